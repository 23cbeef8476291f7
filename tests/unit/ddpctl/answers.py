"""Answers to a verb's commands, by what each command runs: one more command, or another order, breaks no test."""

from collections.abc import Callable, Iterable, Mapping

from ddpctl.command import Command, Output, T, Verb, process_line

OK = Output(returncode=0)
Answer = Output | Mapping[str, Output] | Callable[[Command], Output]  # the same, by host, or made for a command


def text_of(command: Command) -> str:
    """Return the command's line and the script that it reads."""
    return f"{process_line(command)}\n{command.stdin or ''}"


def answer(command: Command, answers: Mapping[str, Answer]) -> Output:
    """Return the first answer whose key is a part of the command; OK if there is none."""
    for part, output in answers.items():
        if part in text_of(command):
            if isinstance(output, Output):
                return output
            return output[str(command.host)] if isinstance(output, Mapping) else output(command)
    return OK


def perform(
    verb: Verb[T], answers: Mapping[str, Answer], commands: list[Command] | None = None
) -> tuple[list[Command], T]:
    """Answer a verb's commands until it ends. Return the commands, also in ``commands``, and its result."""
    commands = [] if commands is None else commands
    outputs: tuple[Output, ...] | None = None
    while True:
        try:
            batch = next(verb) if outputs is None else verb.send(outputs)
        except StopIteration as stop:
            return commands, stop.value
        commands += batch
        outputs = tuple(answer(command, answers) for command in batch)


def matching(commands: Iterable[Command], part: str) -> list[Command]:
    """Return the commands that have this part."""
    return [command for command in commands if part in text_of(command)]


def only(commands: Iterable[Command], part: str = "") -> Command:
    """Return the one command that has this part."""
    (command,) = matching(commands, part)
    return command
