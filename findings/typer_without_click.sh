#!/usr/bin/env bash
# Most people expect a Typer application to understand click, on which Typer is built: click.UsageError exits with 2 and
# one line, click.exceptions.Exit(4) with 4, and `ctx: click.Context` gets the context.
# What happens: typer 0.29 has its own copy of click and does not install click. The exceptions of a click that is
# installed for another reason are foreign: each is a traceback and exit code 1. A parameter of type click.Context becomes
# a command line argument named CTX. click.get_current_context() finds no context. typer.Exit, typer.BadParameter and
# typer.Context work as before.
# Version: typer 0.29.2, click 8.5.1.
# Source: found by experiment; the package typer._click.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check typer==0.29.2
cd "$folder"
if venv/bin/python -c 'import click' 2>/dev/null; then
  echo "changed: typer installs click"
  exit 1
fi
venv/bin/pip install --quiet --disable-pip-version-check click==8.5.1
cat >app.py <<'END'
import click
import typer

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def usage() -> None:
    raise click.UsageError("wrong")


@app.command()
def bad_parameter() -> None:
    raise typer.BadParameter("wrong")


@app.command()
def click_exit() -> None:
    raise click.exceptions.Exit(4)


@app.command()
def typer_exit() -> None:
    raise typer.Exit(4)


@app.command()
def click_context(ctx: click.Context) -> None:
    print(ctx)


@app.command()
def current() -> None:
    print(click.get_current_context(silent=True))


app()
END
results=
for command in usage bad-parameter click-exit typer-exit click-context current; do
  code=0
  venv/bin/python app.py "$command" >output 2>&1 || code=$?
  echo "$command: exit code $code, last line: $(grep -v '^ *$\|─' output | tail -n 1)"
  results+="$code "
done
[[ $results == "1 2 1 4 2 0 " && $(<output) == None ]]
