"""That a rendered spec names a script which is there: a launch would look, and who applies a spec has nobody to look.

Touches nothing.
"""

from ddpctl.command import Command, Verb
from ddpctl.errors import NoInputError
from ddpctl.plan import Plan, script_of


def find_script(plan: Plan) -> Verb[None]:
    """Look for the script in the project's folder on this machine. Raises NoInputError."""
    if (script := script_of(plan.job.command)) is None:
        return
    (found,) = yield (Command(argv=("test", "-f", script), cwd=plan.cwd, probe=True),)
    if found.returncode == 1:  # else test(1) is not here, and has said nothing
        raise NoInputError(f"{script}: no such script in {plan.cwd}")
