"""The target ``kubernetes``: a PyTorchJob, a TrainJob or an Indexed Job, started with the user's own kubectl.

A node is a pod. The modules: ``options``: what a user may set, and what is checked before anything is sent · ``pod``:
the pod template · ``manifests``: the workloads and the objects beside them · ``kubectl``: its command lines and errors,
and the choice of a cluster · ``status``: what pods and jobs report · ``files``: what a run's nodes have written ·
``project``, ``log_follower``: separate programs · ``target``: the verbs.
"""

from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.target import KubernetesTarget

__all__ = ["KubernetesOptions", "KubernetesTarget"]
