"""The forward and backward pass of a batch as one CUDA graph: a single launch, so that no device waits for the host.

A graph repeats its launches at the same addresses and with the same shapes. One serves the batches of a whole run: each
is copied into a room of fixed sizes, and the kernels of the LSTM read on the device how many steps there are, and how
many sequences run at each. What is left of the room is 0, and takes no part in the loss.

Shape suffixes: N tokens and S sequences of the room; U its distinct words; X the ids of a word; M targets of a cluster.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import ceil, prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling_elmo import ELMoForPreTraining
from modeling_elmo.directions import LAYERS_KERNELS, run_layer_by_layer
from modeling_elmo.encoder import FEW_POSITIONS, MANY_WORDS, cropped
from modeling_elmo.inputs import NO_LABEL, PackedBatch
from modeling_elmo.kernels.plan import Plan, is_accelerator, make_plan
from modeling_elmo.kernels.sequences import StepsInRoom, Stream
from modeling_elmo.kernels.torch_state import is_hooked, to_device
from modeling_elmo.modeling_elmo import shifted_targets
from modeling_elmo.softmax import AdaptiveTargets

ONE_LAUNCH = ("persistent", "grouped")  # the backends whose kernels read the steps on the device
RESERVE = 1.1  # of a room, over the largest batch before it
FEW_BATCHES, FEW_OF_ALL = 8, 1 / 16  # that may have no room, in number and as a share, before there is a larger one


class Room(NamedTuple):
    """The sizes of a batch, or of a room, that the number of tokens does not bound well.

    Attributes:
        words: distinct words.
        ids: ids of a word, without the padding that all words share.
        targets: targets of both directions in each cluster of an adaptive softmax.
    """

    words: int
    ids: int
    targets: tuple[int, ...]

    def has_room_for(self, other: "Room") -> bool:
        return self.enlarged_to(other) == self

    def enlarged_to(self, other: "Room") -> "Room":
        targets = map(max, self.targets, other.targets)
        return Room(max(self.words, other.words), max(self.ids, other.ids), tuple(targets))

    def with_reserve(self) -> "Room":
        words, *targets = (ceil(RESERVE * size / MANY_WORDS) * MANY_WORDS for size in (self.words, *self.targets))
        return Room(words, self.ids, tuple(targets))


class StepGraph:
    """Adds the gradients of batches of sentences to a model's, by a CUDA graph once there is a room for them.

    The first batches, and later those that are larger than the room, get no graph. If they are too many, the next room
    has the sizes of the largest batch so far, and a reserve.

    Args:
        model: in training mode, on CUDA.
        tokens: the most tokens of a batch.
        gradient_scale: a factor of the loss before the backward pass.
        autocast: makes the context of the forward pass.
    """

    def __init__(
        self,
        model: ELMoForPreTraining,
        tokens: int,
        gradient_scale: float,
        autocast: Callable[[], AbstractContextManager],
    ):
        self.model = model
        self.tokens = tokens
        self.sequences = max(1, tokens // 2)  # each has two markers
        self.gradient_scale = gradient_scale
        self.autocast = autocast
        self.room: Room | None = None
        self.largest: Room | None = None
        self.seen = self.missed = 0  # batches since the room was made
        self.in_graph: list[bool] = []  # of each batch since the last entry of the log
        self.graph: Any = None

    def obstacle(self) -> str | None:
        """The reason why there is no graph for this model, or `None`."""
        model = self.model
        if not is_accelerator(model.device):
            return f"it is for CUDA, not for {model.device.type}"
        if model.config.softmax_type == "sampled":
            return "the host draws the candidates of a sampled softmax"
        if any(map(is_hooked, model.children())) or not model.elmo.has_own_lstms():
            return "a part of the model is wrapped or has a hook"
        with self.autocast():
            hidden, cell = self._states()
            plan = self._plan(hidden[0], hidden, cell)
        return None if plan.backend in ONE_LAUNCH else plan.reason

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, of which the rooms of the batches to come follow."""
        sizes = {"room": self.room, "largest": self.largest}
        plain = {name: size and tuple(size) for name, size in sizes.items()}
        return {**plain, "seen": self.seen, "missed": self.missed}

    def load_state_dict(self, state: dict[str, Any]):
        self.seen, self.missed = state["seen"], state["missed"]
        self.room, self.largest = (size and Room(*size) for size in (state["room"], state["largest"]))

    def prepare(self, batches: Sequence[dict[str, Any]], num_predictions: int) -> list[Tensor | None]:
        """What `run` copies of each batch of a step to the device; `None` for a batch that has no room.

        It may record the graph, for which it draws random numbers.

        Args:
            batches: inputs of `ELMoForPreTraining.forward`: `packed_batch` and `labels`.
            num_predictions: of one direction in all batches; the loss is divided by it.
        """
        all_numbers: list[dict[str, Tensor] | None] = []
        for batch in batches:
            numbers = None
            if len(batch["packed_batch"].positions_N) <= self.tokens:  # it may have more: its words are estimated
                numbers = self._read(**batch, num_predictions=num_predictions)
                self._make_room(room_for(numbers))
            all_numbers.append(numbers)
        prepared = [None if numbers is None else self._in_room(numbers) for numbers in all_numbers]
        self.in_graph += [flat is not None for flat in prepared]
        first = next((flat for flat in prepared if flat is not None), None)
        if self.graph is None and first is not None:
            self._record(first)
        return prepared

    def run(self, prepared: Tensor) -> Tensor:
        """Adds the gradients of a batch. Returns its losses `(3,)`: joint, forward, backward."""
        self.flat.copy_(to_device(prepared, self.model.device))
        self.graph.replay()
        return self.losses.clone()

    def share_since_last_call(self) -> float:
        """The share of batches that had a graph."""
        share = sum(self.in_graph) / max(1, len(self.in_graph))
        self.in_graph = []
        return share

    def _make_room(self, sizes: Room):
        self.largest = sizes if self.largest is None else self.largest.enlarged_to(sizes)
        self.seen += 1
        if self.room is not None and self.room.has_room_for(sizes):
            return
        self.missed += 1
        if self.missed > FEW_BATCHES + FEW_OF_ALL * self.seen:
            self.room = self.largest.with_reserve()
            self.seen = self.missed = 0
            self.graph = None  # its memory is free for the next one

    def _read(self, packed_batch: PackedBatch, labels: Tensor, num_predictions: int) -> dict[str, Tensor]:
        """All numbers of a batch that the device reads, by name, on the CPU."""
        elmo, softmax, config = self.model.elmo, self.model.softmax, self.model.config
        ids_UX = packed_batch.ids_UX
        elmo.check_words(ids_UX)
        if elmo.char_encoder is not None:
            width = config.max_word_length
            characters_UW = cropped(ids_UX[:, -width:], elmo.char_encoder.widest, FEW_POSITIONS)
            ids_UX = torch.cat([ids_UX[:, :-width], characters_UW], 1)
        orders = packed_batch.forward_N, packed_batch.backward_N
        targets_2N = torch.full((2, self.tokens), NO_LABEL)
        for direction, order_N in enumerate(orders):
            targets_N = shifted_targets(labels, direction, packed_batch, config)
            targets_2N[direction, : len(order_N)] = targets_N[order_N]
        classes_2N, clusters = targets_2N.flatten(), []
        if softmax.adaptive is not None:
            classes_2N, clusters = softmax.arrange(classes_2N)
        steps, last_S, before_N = StepsInRoom.numbers(packed_batch.steps, self.sequences)
        numbers = {
            "ids_UX": ids_UX,
            "index_2N": torch.stack([packed_batch.index_N[order_N] for order_N in orders]),
            "steps": steps,
            "last_S": last_S,
            "before_N": before_N,
            "is_target_2N": targets_2N != NO_LABEL,
            "classes_2N": classes_2N.clamp(min=0).view_as(targets_2N),
            "num_predictions": torch.tensor([num_predictions]),
        }
        for number, (rows_M, ranks_M) in enumerate(clusters):
            numbers |= {f"rows_M {number}": rows_M, f"ranks_M {number}": ranks_M}
        return numbers

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of `_read` in the room."""
        assert self.room is not None
        of_tokens = 2, self.tokens
        shapes: dict[str, tuple[int, ...]] = {
            "ids_UX": self.room[:2],
            "index_2N": of_tokens,
            "steps": (1 + self.tokens,),
            "last_S": (self.sequences,),
            "before_N": (self.tokens,),
            "is_target_2N": of_tokens,
            "classes_2N": of_tokens,
            "num_predictions": (1,),
        }
        for number, size in enumerate(self.room.targets):
            shapes |= {f"rows_M {number}": (size,), f"ranks_M {number}": (size,)}
        return shapes

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of the room."""
        shapes = self._shapes()
        parts = flat.split([prod(shape) for shape in shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    def _in_room(self, numbers: dict[str, Tensor]) -> Tensor | None:
        """The numbers of a batch, and 0 elsewhere, in one tensor; `None` if it needs more room."""
        if self.room is None or not self.room.has_room_for(room_for(numbers)):
            return None
        flat = torch.zeros(sum(map(prod, self._shapes().values())), dtype=torch.int64)
        for name, part in self._views(flat).items():
            if name.startswith("rows_M"):
                part.fill_(2 * self.tokens - 1)  # the last token of a sequence, or none: it has no target
            values = numbers[name]
            part[tuple(map(slice, values.shape))] = values
        return flat

    def _record(self, flat: Tensor):
        self.graph = None
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.flat = to_device(flat, self.model.device)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries and compilers prepare what a graph cannot record
            self._backward()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.losses = self._backward()
        for parameter in parameters:
            parameter.grad.zero_()
        self.graph = graph

    def _backward(self) -> Tensor:
        with self.autocast():
            losses = self._losses(self._views(self.flat))
        (losses[0] * self.gradient_scale).backward()
        return losses.detach()

    def _losses(self, numbers: dict[str, Tensor]) -> Tensor:
        """As `ELMoForPreTraining.forward`, for the batch in the room. All tokens have predictions, some of scale 0."""
        model = self.model
        words_UP = model.elmo.compute_words(numbers["ids_UX"])
        steps = StepsInRoom(numbers["steps"], numbers["last_S"], numbers["before_N"])
        streams = [Stream(words_UP, steps, index_N) for index_N in numbers["index_2N"]]
        states = self._states(words_UP.dtype)
        kernel = LAYERS_KERNELS[self._plan(words_UP, *states).backend]
        lstms = model.elmo.forward_lstm, model.elmo.backward_lstm
        results = run_layer_by_layer(kernel, lstms, streams, [states] * 2)
        top_XP = torch.cat([outputs[-1] for outputs, *_ in results])
        top_XP = F.dropout(top_XP, model.config.dropout, model.training)
        scale_2N = numbers["is_target_2N"] / numbers["num_predictions"]
        targets: Any = numbers["classes_2N"].flatten()
        if self.room.targets:
            clusters = [
                (numbers[f"rows_M {number}"], numbers[f"ranks_M {number}"]) for number in range(len(self.room.targets))
            ]
            targets = AdaptiveTargets(targets, clusters)
        loss, losses_X = model.softmax(top_XP, targets, scale_2N.flatten() / 2)
        by_direction_2 = (scale_2N * losses_X.view_as(scale_2N)).sum(1)
        return torch.cat([loss[None], by_direction_2]).float()

    def _states(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Zeros: hidden and cell at the start, `(layers, S, ...)`."""
        config, device = self.model.config, self.model.device
        sizes = config.num_hidden_layers, self.sequences
        hidden = torch.zeros(*sizes, config.projection_size, dtype=dtype, device=device)
        return hidden, torch.zeros(*sizes, config.lstm_hidden_size, device=device)

    def _plan(self, inputs: Tensor, hidden: Tensor, cell: Tensor) -> Plan:
        lstms = self.model.elmo.forward_lstm, self.model.elmo.backward_lstm
        linears = [linear for lstm in lstms for layer in lstm.layers for linear in layer.children()]
        return make_plan(linears, inputs, hidden, cell, is_lstm=True)


def room_for(numbers: dict[str, Tensor]) -> Room:
    """What a batch needs."""
    targets = (len(values) for name, values in numbers.items() if name.startswith("rows_M"))
    words, ids = numbers["ids_UX"].shape
    return Room(words, ids, tuple(targets))
