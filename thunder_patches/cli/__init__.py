"""The ``thunder`` command. Nothing that runs inside a server imports this package.

Each subcommand is a module here with ``register(app: typer.Typer) -> None``, and is imported only
when it is asked for; its name is in `COMMANDS`, in the order of the help.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = ("doctor", "status", "cache", "calibrate", "bench", "demo")

HELP = "Look after the thunder patches of your MLX server."
_COMPLETE = "_THUNDER_COMPLETE"  # set by the shell that asks for completions


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. An error is one line, without a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        import typer
    except ModuleNotFoundError as missing:
        return _fail(f"{missing.name} is missing; run: pip install 'thunder-patches[cli]'")

    try:
        command = typer.main.get_command(_app(words))
        result = command.main(args=words or ["--help"], prog_name="thunder", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (typer.Abort, KeyboardInterrupt):
        return _fail("stopped", 130)
    except BrokenPipeError:
        # The reader of our output left; keep the interpreter's last flush from complaining.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        # A usage error, of typer's own click or of the one on PyPI, knows how to put itself.
        message = getattr(error, "format_message", None)
        if message is not None:
            status = getattr(error, "exit_code", 2)
            return _fail(message(), status) if message() else status  # it showed the help
        return _fail(f"{type(error).__name__}: {error}")


def _app(words: Sequence[str]) -> typer.Typer:  # type: ignore[name-defined]  # noqa: F821
    """The app with the subcommand that is asked for, or with all of them for the help."""
    import typer

    app = typer.Typer(help=HELP, pretty_exceptions_enable=False)

    @app.callback(invoke_without_command=True)
    def version(
        show: bool = typer.Option(False, "--version", help="Show the version and stop."),
    ) -> None:
        if show:
            from thunder_patches import __version__

            print(f"thunder {__version__}")
            raise typer.Exit

    completing = [os.environ.get(name, "") for name in ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")]
    words = [*words, *" ".join(completing).split()[1:]] if _COMPLETE in os.environ else words
    asked = next((word for word in words if word in COMMANDS), None)
    for name in COMMANDS if asked is None else (asked,):
        path = f"{__name__}.{name}"
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as missing:
            if missing.name == path:
                continue
            if asked is not None:
                raise
            print(f"thunder: {name} needs {missing.name}, which is missing", file=sys.stderr)
            continue
        module.register(app)
    return app


def _fail(message: str, status: int = 1) -> int:
    print(f"thunder: {' '.join(message.split())}", file=sys.stderr)
    return status
