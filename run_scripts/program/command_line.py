"""Options and errors of all programs: what a user got wrong ends in one line, and a bug in its traceback."""

import dis
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import HfArgumentParser

USER_ERROR = 2  # exit status, as argparse has it


class ProgramParser(HfArgumentParser):
    """The parser of a program: its dataclasses of options, under the program's docstring.

    Args:
        dataclass_types: the groups of options; `parse` returns one object for each.
        description: the program's docstring.
    """

    def __init__(self, *dataclass_types: type, description: str | None = None, **options: Any):
        options = {"description": description, "formatter_class": RawDescriptionHelpFormatter, **options}
        super().__init__(dataclass_types, **options)

    def parse(self, arguments: Sequence[str] | None = None) -> Any:
        """The objects of all groups; a single one where there is but one group.

        Raises:
            ValueError: an option is unknown, or its value is refused.
        """
        try:
            *parsed, unknown = self.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
        except ValueError as error:  # also those of transformers' own options
            raise ValueError(str(error)) from error
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            close = get_close_matches(unknown[0], known, 1)
            raise ValueError(
                f"{unknown[0]} is no option of this program. "
                + (f"Did you mean {close[0]}?" if close else "--help lists them.")
            )
        return parsed[0] if len(parsed) == 1 else tuple(parsed)


def run(main: Callable[[], Any]):
    """Runs a program from its command line.

    A mistake of the user ends in `PROGRAM: error: MESSAGE` and exit status 2; `--debug` shows its traceback. All other
    exceptions are bugs, and show theirs.
    """
    is_debugging = _take_debug_flag()
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # the shell's status for Ctrl-C
    except Exception as error:
        if is_debugging or not is_mistake_of_user(error):
            raise
        program = sys.argv[0].replace("\\", "/").rpartition("/")[2]
        print(f"{program}: error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)


def _take_debug_flag() -> bool:
    """Removes `--debug`, unless a value follows: then it is an option of transformers' `TrainingArguments`."""
    places = [place for place, argument in enumerate(sys.argv) if argument == "--debug"]
    bare = [place for place in places if sys.argv[place + 1 : place + 2] == [] or sys.argv[place + 1].startswith("-")]
    for place in reversed(bare):
        del sys.argv[place]
    return bool(bare)


def is_mistake_of_user(error: BaseException) -> bool:
    """Whether our code raised the error on purpose, or a file, a folder or the Hub was not as expected.

    An error that a library or the interpreter raises inside our code is a bug of ours.
    """
    if isinstance(error, (OSError, StrictDataclassError)):
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or isinstance(error, AssertionError):
        return False
    is_ours = last.tb_frame.f_globals["__name__"].split(".")[0] in ("modeling_elmo", "transformers_modules", "__main__")
    return is_ours and last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
