"""The target ``kubernetes``: a PyTorchJob, a TrainJob or an Indexed Job, by the person's own kubectl.

A node is a pod; the rooms beside this one write it down (pod, workloads), refuse what a cluster would swallow
(refusals), and say of a cluster's answers what they mean (answers, reasons, status).
"""

from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.target import KubernetesTarget

__all__ = ["KubernetesOptions", "KubernetesTarget"]
