"""The command line of every program: its options, its help and its errors."""

import errno
import io
import math
import os
import re
import sys
from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, field, fields, is_dataclass
from difflib import get_close_matches
from glob import glob
from importlib.util import find_spec
from inspect import get_annotations
from itertools import chain, product
from pathlib import Path
from shlex import quote
from traceback import walk_tb
from typing import Any, NoReturn

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from .memory import keep_memory

USER_ERROR = 2  # argparse's exit status
INTERRUPTED = 130  # the shell's exit status for Ctrl-C
UNREAD_OUTPUT = 141  # the shell's exit status for a program whose output nobody reads any more, as before `head`
# A user can put these errors right. All others are bugs.
MISTAKES = (ValueError, OSError, ImportError, FloatingPointError, StrictDataclassError, SafetensorError)
OUR_PACKAGES = ("modeling_elmo", "transformers_modules", "__main__")  # the second holds the code of checkpoints
MOST_CHOICES = 10  # shown in the help; Trainer's --optim has 42
# Options of all programs that name what they replace, and what they read.
OUTPUT_OPTIONS = ("output", "output_dir", "page")
INPUT_OPTIONS = """
    train_file validation_file test_file input text text_file pairs dataset vocabulary_file model model_name_or_path
    tokenizer_name ensemble vectors word_vectors words control_words sense_inventory plan data_statement citation
"""
# Other JSON files of a folder that is read are results.
JSON_OF_MODELS = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
TRAINER_OPTIONS = "options of transformers' Trainer"

POSITIVE = """
    adam_epsilon batch_size batch_tokens bin_width early_stopping_patience eval_steps gradient_accumulation_steps
    gradient_scale
    learning_rate logging_steps max_answer_length max_eval_samples max_sentences max_train_samples max_word_length
    min_frequency num_sampled num_train_epochs per_device_eval_batch_size per_device_eval_batch_tokens
    per_device_train_batch_size permutations processes queries rounds save_steps save_total_limit seeds shuffle_buffer
    threads top_k unroll_steps vocabulary_size word_vectors_limit
"""
NOT_NEGATIVE = """
    clusters controls dataloader_num_workers decay_steps doc_stride max_grad_norm scalar_mix_l2 warmup_steps
    weight_decay word_embedding_size word_min_count
"""
BELOW_ONE = "adam_beta1 adam_beta2 elmo_dropout ema_decay label_smoothing_factor"
# What a number must be, and whether it is, by the name of its option: a name has one meaning in all programs.
BOUNDS: dict[str, tuple[str, Callable[[float], bool]]] = {}
for _names, _needed, _is_within in (
    (POSITIVE, "a number above 0", lambda value: 0 < value < math.inf),
    (NOT_NEGATIVE, "0 or more", lambda value: 0 <= value < math.inf),
    (BELOW_ONE, "a number from 0 to below 1", lambda value: 0 <= value < 1),
    (
        "max_length per_device_train_batch_tokens",
        "3 or more, for a word and two markers",
        lambda value: 3 <= value < math.inf,
    ),
    ("max_steps", "a number above 0, or -1 for no maximum", lambda value: value == -1 or 0 < value < math.inf),
    ("lr_decay train_fraction", "a number above 0, up to 1", lambda value: 0 < value <= 1),
    ("data_seed seed", f"a number from 0 to {2**32 - 1}", lambda value: 0 <= value < 2**32),
):
    BOUNDS |= dict.fromkeys(_names.split(), (_needed, _is_within))
ANY_NUMBER = ("a number", lambda value: -math.inf <= value <= math.inf)


def option(default: Any, help: str, **argument: Any) -> Any:
    """A field of a program's options: its default (`...`: required), its help, and more for argparse (`choices`)."""
    metadata = {"help": help, **argument}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


# How the help names values, by the last word of an option, or else by its type.
VALUES = {"file": "FILE", "files": "FILE", "dir": "FOLDER", int: "INT", float: "FLOAT", string_to_bool: "BOOL"}


class HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """One spelling per option, the kind of its value, and its default if there is one."""

    def _format_action_invocation(self, action: Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = [name for name in action.option_strings if "-" not in name[2:]]  # also accepted with hyphens
        if action.type is string_to_bool and action.nargs == "?":  # a flag
            if action.default is True:
                names.append(f"--no_{action.dest}")
            return ", ".join(names)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(names)} {value}".rstrip()

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        last_word = action.dest.rpartition("_")[2]
        return VALUES.get(last_word) or VALUES.get(action.type, "TEXT")

    def _get_help_string(self, action: Action) -> str | None:
        is_told = action.required or "default" in (action.help or "").lower()
        is_empty = action.default is False or action.default in (None, SUPPRESS, "", [], {})
        return action.help if is_told or is_empty else super()._get_help_string(action)


class StoreAll(Action):
    """Stores the value of an option; the values of a list also if the option is given several times."""

    def __call__(self, parser, namespace, values, option_string=None):
        before = getattr(namespace, self.dest)
        if isinstance(values, list) and before is not self.default:
            values = before + values
        setattr(namespace, self.dest, values)


class ProgramParser(HfArgumentParser):
    """The parser of a program, from dataclasses of options; the help has a section for each.

    The title of a section is `_argument_group_name` of the class that declares or shows its options, or "options".
    """

    def __init__(self, *dataclass_types: type, **options: Any):
        super().__init__(dataclass_types, **{"formatter_class": HelpFormatter, **options})
        texts: dict[str, str] = {}
        self.titles: dict[str, str] = {}
        self.is_help_long = False
        for base in chain.from_iterable(reversed(group.__mro__) for group in self.dataclass_types):
            if not (is_dataclass(base) and isinstance(base, type)):
                continue
            title = vars(base).get("_argument_group_name", "options")
            if base.__module__.startswith("transformers."):
                title = TRAINER_OPTIONS
            shown = vars(base).get("_shown_options", "").split()
            self.titles |= dict.fromkeys([*get_annotations(base), *shown], title)
            for item in fields(base):
                if "help" in item.metadata:
                    texts[item.name] = item.metadata["help"]
        for action in self._actions:
            action.help = action.help or texts.get(action.dest)  # of a base class, if only the default is changed
            if action.choices is not None and len(list(action.choices)) > MOST_CHOICES:
                action.metavar = "TEXT"

    def _add_dataclass_arguments(self, dtype: type):
        self.register("action", None, StoreAll)  # else the last list of an option would replace the others
        super()._add_dataclass_arguments(dtype)

    def parse(self, arguments: Sequence[str] | None = None) -> Any:
        """One object per group of options, and a namespace of options outside all groups; a single object as such."""
        arguments = sys.argv[1:] if arguments is None else arguments
        refuse_names_not_utf8(arguments)
        if "--help_all" in arguments:
            self.is_help_long = True
            arguments = ["--help"]
        namespace, unknown = self.parse_known_args(arguments)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            close = get_close_matches(unknown[0].partition("=")[0], known, 1)
            advice = f"Did you mean {close[0]}?" if close else "--help lists the options."
            raise ValueError(f"{unknown[0]} is not an option of this program. {advice}")
        options = vars(namespace)
        for name, value in options.items():
            allowed, is_within = BOUNDS.get(name, ANY_NUMBER)
            if isinstance(value, (int, float)) and not is_within(value):
                raise ValueError(f"--{name} {value}: pass {allowed}.")
        refuse_replaced_inputs(options)
        parsed = []
        for group in self.dataclass_types:
            of_group = {item.name: options.pop(item.name) for item in fields(group) if item.init}
            parsed.append(self._group(group, of_group))
        if options:
            parsed.append(namespace)
        return parsed[0] if len(parsed) == 1 else tuple(parsed)

    def _group(self, group: type, options: dict[str, Any]) -> Any:
        """A group of options. An error that goes away with the default of one option is about this option."""
        try:
            return group(**options)
        except Exception as error:
            if is_mistake_of_user(error) and (isinstance(error, OSError) or "--" in str(error)):  # it names the option
                raise
            causes = []
            for name, value in options.items():
                default = self.get_default(name)
                if value != default:
                    with suppress(Exception):
                        group(**{**options, name: default})
                        causes.append(f"--{name} {value}")
            if not causes:
                raise
            reason = flat_message(error).rstrip(".")
            raise ValueError(f"{', '.join(causes)}: {reason}. Pass another value, or leave it out.") from error

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        print(end="", flush=True)  # Python would do it last, and report an output that nobody reads
        super().exit(status, message)
        raise AssertionError

    def error(self, message: str) -> NoReturn:
        """Ends the program with one line, without the usage."""
        one_name = re.sub(r"(--\w+)/--[\w-]+", r"\1", message)
        print(f"{self.prog}: error: {one_name}", file=sys.stderr)
        sys.exit(USER_ERROR)

    def format_help(self) -> str:
        """Usage with the required options, description, and sections of options, with Trainer last."""
        formatter = self._get_formatter()
        shown = [action for action in self._actions if action.required or action.dest == "help"]
        formatter.add_usage(None, shown, [])
        formatter.add_text(self.description)
        sections = self._sections()
        others = [] if self.is_help_long else sections.pop(TRAINER_OPTIONS, [])
        for title, actions in sections.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        rest = f"--help_all also lists {len(others)} other {TRAINER_OPTIONS}." if others else None
        formatter.add_text("\n\n".join(filter(None, [rest, self.epilog, "--debug shows the traceback of an error."])))
        return formatter.format_help()

    def _sections(self) -> dict[str, list[Action]]:
        """Sections by title, with Trainer last. Required options come first in a section."""
        ranks = {"arguments": 0, "options": 1, TRAINER_OPTIONS: 3}
        sections: dict[str, list[Action]] = {}
        for action in sorted(self._actions, key=lambda action: not action.required):
            is_negation = action.nargs == 0 and action.const is False  # shown beside the option itself
            if action.dest == "help" or is_negation:
                continue
            default_title = "options" if action.option_strings else "arguments"
            title = self.titles.get(action.dest, default_title)
            sections.setdefault(title, []).append(action)
        return dict(sorted(sections.items(), key=lambda section: ranks.get(section[0], 2)))


def refuse_unread(arguments: Any, options: Iterable[str], reason: str):
    """Refuses options of a group that differ from their defaults, although the program does not read them."""
    defaults = {item.name: item.default for item in fields(arguments)}
    for name in options:
        value = getattr(arguments, name, None)
        if name in defaults and value != defaults[name]:
            shown = "" if value is True else f" {value}"
            raise ValueError(f"--{name}{shown} has no effect {reason}")


def refuse_replaced_inputs(options: Mapping[str, Any]):
    """Refuses an output that is an input, whatever its path: a link, another spelling, part of a pattern or folder."""
    for output in OUTPUT_OPTIONS:
        if not options.get(output):
            continue
        target = Path(options[output])
        replaced = list(filter(Path.exists, (target, target / "vocab.txt")))  # a training writes the second
        is_result = target.suffix == ".json" and target.name not in JSON_OF_MODELS
        if target.is_file() and not is_result:
            replaced += target.resolve().parents
        for pattern in _inputs_of(options) if replaced else ():
            inputs = filter(Path.exists, map(Path, (pattern, *glob(pattern, recursive=True))))
            if any(path.samefile(other) for path, other in product(inputs, replaced)):
                raise ValueError(f"--{output} {target} would replace {pattern}, which is read. Pass another path.")


def _inputs_of(options: Mapping[str, Any]) -> Iterator[str]:
    """The paths and patterns of all options that name what a program reads."""
    for name in INPUT_OPTIONS.split():
        value = options.get(name) or []
        yield from [value] if isinstance(value, str) else value


def refuse_names_not_utf8(names: Iterable[str]):
    """Refuses names that Python reads with half surrogates: no JSON, card, table or figure can hold them."""
    for name in names:
        if name != name.encode(errors="replace").decode():
            raise ValueError(f"{name} is not UTF-8; if it is the name of a file, rename the file.")


def run(main: Callable[[], Any]) -> None:
    """Runs a program as a process: exit status 2 and one line for a mistake of the user, a traceback for a bug.

    `--debug` on the command line shows the traceback of every error; transformers' option is `--debug=VALUE`.
    """
    keep_memory()
    is_debugging = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # escapes for what its encoding lacks; a log is read while it grows
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        main()
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()  # a process that exits inside its group may abort
        print(end="", flush=True)  # Python would do it last, and report an output that nobody reads
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        unwritten = _discard_unwritten_output()
        if isinstance(error, OSError) and unwritten is not None:
            if unwritten.errno == errno.EINVAL:  # a closed pipe on Windows
                sys.exit(UNREAD_OUTPUT)
            error = OSError(unwritten.errno, unwritten.strerror, "The output")
        if isinstance(error, BrokenPipeError):
            sys.exit(UNREAD_OUTPUT)
        if is_debugging or not is_mistake_of_user(error):
            raise
        program = re.split(r"[/\\]", sys.argv[0])[-1]
        print(f"{program}: error: {_message(error)}", file=sys.stderr)
        sys.exit(USER_ERROR)


def _discard_unwritten_output() -> OSError | None:
    """Why the output cannot be written, if so. Python writes the rest when it ends, which must not fail again."""
    reason = None
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError as error:
            reason = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return reason


def print_conclusion(finding: str, *command: object):
    """The last lines of a program: what was found, in a sentence, and the next command, with names in capitals."""
    print(f"\n{finding}")
    print(f"Next: {' '.join(quote(str(word)) for word in command)}")


def option_words(options: Mapping[str, Any]) -> Iterator[str]:
    """The words of a command line that give options these values."""
    for name, value in options.items():
        if value is False:
            yield f"--no_{name}"
            continue
        yield f"--{name}"
        if isinstance(value, list):
            yield from map(str, value)
        elif value is not True:
            yield str(value)


def given_options(*groups: Any, but: Iterable[str] = ()) -> list[str]:
    """The words that repeat the options of dataclasses, except for defaults and for the names in `but`."""
    given = {}
    for group in groups:
        for item in fields(group):
            default = item.default if item.default_factory is MISSING else item.default_factory()
            value = getattr(group, item.name)
            if item.name not in but and value != default:
                given[item.name] = "False" if value is False and default is None else value  # no --no_NAME then
    return [*option_words(given)]


def require(module: str, extra: str, purpose: str):
    if find_spec(module) is None:
        raise ImportError(f'{purpose} needs {module}: pip install "modeling-elmo[{extra}]"')


def is_mistake_of_user(error: BaseException) -> bool:
    """Whether a user can put the error right: one of `MISTAKES`, unless a module of ours is missing."""
    return isinstance(error, MISTAKES) and not str(getattr(error, "name", "")).startswith("modeling_elmo")


def flat_message(error: BaseException) -> str:
    """The message of an error, of which libraries make several lines; with the class, if it may say nothing alone."""
    message = " ".join(str(error).split())
    return message if isinstance(error, MISTAKES) else f"{type(error).__name__}: {message}"


def _message(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f'{error}. Install the packages that the programs need: pip install "modeling-elmo[train,convert]"'
    if isinstance(error, SafetensorError):
        return f"A .safetensors file cannot be read or written ({error}). If it is damaged, copy it again."
    if isinstance(error, OSError) and error.strerror:  # without the number of the error
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if "DataLoader worker process" in str(error):  # with the traceback of the worker; the last line is the message
        return str(error).strip().rpartition("\n")[2].partition(": ")[2]
    *_, (frame, _) = walk_tb(error.__traceback__)
    if frame.f_globals.get("__name__", "").partition(".")[0] in OUR_PACKAGES:
        return str(error)
    hint = " (--debug shows the traceback)" if isinstance(error, ValueError) else ""  # it may be a bug
    return flat_message(error) + hint
