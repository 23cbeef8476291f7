"""What a forked rank has for itself, what it may start, and when a rank is executed instead."""


def test_ddprun_forks_unless_it_is_told_to_execute(runs, tmp_path):
    (tmp_path / "script.py").write_text("import gc; print(gc.get_freeze_count() > 0)")
    for options in ((), ("--exec",)):
        node = runs.start(str(tmp_path / "script.py"), options=options)
        assert node.end() == 0
    assert node.log(0) == "True\nFalse\n"
