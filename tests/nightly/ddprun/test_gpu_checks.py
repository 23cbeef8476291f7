"""GPU checks against a stand-in of NVML's interface that answers documented values. No GPU was at hand."""

from tests.unit.ddpcheck.test_gpu_checks import look, nvml


class NVMLError(Exception):
    pass


def test_links_that_are_down_beside_others_and_a_lost_gpu(monkeypatch):
    nvml(monkeypatch, links_down=(3,))
    findings, _ = look()
    assert (findings["NVLink"].status, findings["NVLink"].value) == ("bad", "GPU 1: down: 3; 17 up")
    nvml(monkeypatch, num_links=0, lost=(1,))
    findings, kinds = look()
    assert (findings["NVLink"].status, findings["NVLink"].value) == ("ok", "none")
    assert (findings["GPUs"].status, findings["GPUs"].value) == ("bad", "GPU 1: GPU is lost")
    assert kinds["GPUs"] == "1 x NVIDIA H100 80GB HBM3"
