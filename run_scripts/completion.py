"""Prints the script with which a shell completes the programs of `elmo`, their options, choices and files.

    elmo completion bash > ~/.local/share/bash-completion/completions/elmo

The script is made from the parsers of the installed programs and runs without Python. Print it again after an update.
"""

import sys
from argparse import Action, ArgumentParser
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from unittest.mock import patch

import shtab

from modeling_elmo.run_scripts.modeling_elmo_cli import PROGRAMS, package_version
from modeling_elmo.run_scripts.program.command_line import ProgramParser, run


def main(arguments: list[str] | None = None) -> None:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="Shell that reads the script.")
    shell = parser.parse_args(arguments).shell
    print(shtab.complete(command_parser(), shell))


def command_parser() -> ArgumentParser:
    """The whole command: a parser with a sub-parser for each program."""
    programs: dict[str, ArgumentParser] = {}
    for name, (_, purpose) in PROGRAMS.items():
        try:
            programs[name] = program_parser(name)
        except ImportError as error:  # the package of an extra is missing
            print(f"elmo completion: no options of `elmo {name}`: {error}", file=sys.stderr)
            programs[name] = ArgumentParser(description=purpose)
    command = parser_of_commands("elmo", programs)
    command.add_argument("--version", action="version", version=package_version(), help="Show the version.")
    return command


def program_parser(name: str, *words: str) -> ArgumentParser:
    """The parser of `elmo NAME WORDS`. A first argument that leads to parsers of its own becomes their command."""
    parser = parser_that_helps(name, *words)
    positionals = [action for action in parser._actions if not action.option_strings]
    if positionals and positionals[0].choices:
        choices = [str(choice) for choice in positionals[0].choices]
        if parser_that_helps(name, *words, choices[0]).prog != parser.prog:
            inner = {choice: program_parser(name, *words, choice) for choice in choices}
            return parser_of_commands(parser.prog, inner, parser.description)
    for action in parser._actions:
        simplify(action)
    return parser


def parser_that_helps(name: str, *words: str) -> ProgramParser:
    """The parser that answers `elmo NAME WORDS --help`: programs make their parsers in `main`."""
    program = import_module(f"modeling_elmo.run_scripts.{PROGRAMS[name][0]}")
    with patch.object(ProgramParser, "print_help", autospec=True) as print_help, suppress(SystemExit):
        program.main([*words, "--help"])
    return print_help.call_args.args[0]


def parser_of_commands(
    prog: str, parsers: Mapping[str, ArgumentParser], description: str | None = None
) -> ArgumentParser:
    command = ArgumentParser(prog=prog, description=description)
    commands = command.add_subparsers()
    for name, parser in parsers.items():
        commands.add_parser(name, help=parser.description)
        commands.choices[name] = parser
    return command


def simplify(action: Action) -> None:
    """One spelling per option, as in the help; no values after flags; files or folders as the values of texts."""
    action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
    if action.nargs == "?" and action.const is not None:
        action.nargs = 0
    elif action.nargs is None and action.type in (None, str) and not action.choices:
        action.complete = shtab.DIRECTORY if action.dest.endswith("_dir") else shtab.FILE  # type: ignore[attr-defined]


if __name__ == "__main__":
    run(main)
