"""ELMo: a character-level bidirectional language model (biLM), and the mix of its layers.

Peters et al. 2018, "Deep contextualized word representations", https://arxiv.org/abs/1802.05365. In reading order: the
layers become one vector (`ScalarMix`); characters become token vectors (`ELMoCharacterEncoder` in `elmo_encoder.py`)
and token vectors become layers (`ELMoLSTM` in `elmo_lstm.py`) in the model (`ELMoModel`); the training objective
(`ELMoForPreTraining`). Task heads are in `modeling_elmo_heads.py`.

Shape suffixes: B batch; T time; N real tokens of the batch; M pairs of neighboring tokens; U distinct words;
X the ids of a word (`max_word_length` characters, after the word's id if the model has word vectors); P
`projection_size`; E 2 * P; S sequences.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils import ModelOutput

from .configuration_elmo import ELMoConfig
from .elmo_backends import fetched, is_exporting, is_hooked
from .elmo_base import ELMoPreTrainedModel, zero_row
from .elmo_encoder import ELMoCharacterEncoder, ELMoTokenMixin, VocabularyCache, distinct_rows
from .elmo_inputs import (
    States,
    TokenBatch,
    check_ids,
    join_states,
    on_host,
    option_that_takes_labels,
    pack,
    returns_output,
    starting_states,
    to_device,
    token_mask,
    unpack_layers,
    unpad,
    word_mask,
)
from .elmo_lstm import ELMoLSTM, run_directions, run_in_export
from .elmo_scoring import ELMoScoringMixin, check_targets, neighbor_tokens
from .elmo_softmax import Candidates, ELMoSoftmax


class StatesOutput(ModelOutput):
    """An output whose `final_states` are a pair, and among its `items()` an output of their own.

    Pipelines read the items of a batch, and split by row what they know: tensors and nested outputs, but no pairs.
    """

    def items(self):
        items = dict(super().items())
        if states := items.get("final_states"):
            items["final_states"] = ModelOutput(hidden=states[0], cell=states[1])
        return items.items()

    def __getitem__(self, key):
        return dict(super().items())[key] if isinstance(key, str) else super().__getitem__(key)

    def __setitem__(self, key, value):
        super().__setitem__(key, tuple(value.values()) if key == "final_states" and isinstance(value, dict) else value)


@dataclass
class ELMoModelOutput(StatesOutput):
    """Output of `ELMoModel`. All vectors are zeros at padding.

    Shape:
        last_hidden_state: `(batch, time, 2 * projection_size)`, the top biLSTM layer, forward half first.
        elmo_embeddings: `(batch, time, 2 * projection_size)`, the mix of all layers (equation 1), or `None`.
        hidden_states: `num_hidden_layers + 1` tensors of the same shape. The first is the token layer, twice.
        final_states: `hidden (batch, layers, 2, projection_size)` and `cell (batch, layers, 2, lstm_hidden_size)` at
            the end of each direction, for `initial_states` of the next call; `None` if a row has two texts.
    """

    last_hidden_state: Tensor | None = None
    elmo_embeddings: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    final_states: States | None = None


@dataclass
class ELMoForPreTrainingOutput(StatesOutput):
    """Output of `ELMoForPreTraining`.

    Shape:
        loss: `()`, the mean of both directions' losses (section 3.1), in nats per prediction.
        forward_loss, backward_loss: `()`, the loss of each direction, for reports only: they have no gradient.
        hidden_states: as in `ELMoModelOutput`; only on request, and only if both directions read the same text.
        final_states: as in `ELMoModelOutput`.
    """

    loss: Tensor | None = None
    forward_loss: Tensor | None = None
    backward_loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    final_states: States | None = None

    def __getitem__(self, key):
        if key == "logits":
            option = option_that_takes_labels()
            reader = "" if option is None else f", which Trainer's `{option}` reads"
            advice = "call `score` or `predict_words`" if option is None else "leave it out"
            raise KeyError(f"The output has losses and no `logits`{reader}; {advice}.")
        return super().__getitem__(key)


class ScalarMix(nn.Module):
    """Mixes all layers into one vector per token: `gamma * sum_j softmax(s)_j h_j` (equation 1).

    `scalar_mix_mode` can fix the weights: `"average"`, `"top"`, or the number of one layer. Gamma is always learned.
    Exclude both from weight decay, which would pull gamma to 0. `scalar_mix_l2` is the paper's regularisation.
    """

    def __init__(self, config: ELMoConfig):
        super().__init__()
        self.mode = config.scalar_mix_mode
        self.num_layers = config.num_hidden_layers + 1
        self.layer_norm = config.scalar_mix_layer_norm
        self.l2 = config.scalar_mix_l2
        self.weights = nn.Parameter(torch.zeros(self.num_layers)) if self.mode == "learned" else None
        self.gamma = nn.Parameter(torch.ones(1))

    def reset_parameters(self):
        """The average of the layers."""
        init.ones_(self.gamma)
        if self.weights is not None:
            init.zeros_(self.weights)

    def layer_weights(self) -> Tensor:
        """`(layers,)`: the share of each layer. The sum is 1."""
        if self.weights is not None:
            return fetched(self, "weights").softmax(0)
        gamma = fetched(self, "gamma")
        if self.mode == "average":
            return torch.full_like(gamma, 1 / self.num_layers).expand(self.num_layers)
        layer = self.num_layers - 1 if self.mode == "top" else self.mode
        return F.one_hot(torch.tensor(layer, device=gamma.device), self.num_layers).to(gamma.dtype)

    def penalty(self) -> Tensor:
        """`scalar_mix_l2 * ||s||^2` on the raw weights (section 3.3). Large values keep the mix near the average."""
        return self(None)  # an offloaded parameter can be read only inside the call of its module

    def forward(self, hidden_states: tuple[Tensor, ...] | None, attention_mask: Tensor | None = None) -> Tensor:
        """Mixes the layers, each `(batch, time, width)`; zeros where `attention_mask` `(batch, time)` is 0.

        The layers may also have the real tokens only, `(tokens, width)`, and the mix has then, too; the layer norm
        `"bilm"` then needs the mask, which shows the rows.
        """
        if hidden_states is None:
            return self.l2 * (self.weights if self.weights is not None else self.gamma.new_zeros(1)).square().sum()
        if len(hidden_states) != self.num_layers:
            raise ValueError(
                f"ScalarMix received {len(hidden_states)} layers; pass all {self.num_layers} of `hidden_states`."
            )
        if attention_mask is None:
            attention_mask = hidden_states[0].new_ones(hidden_states[0].shape[:-1])
        mask_BT = attention_mask.bool()
        layers = [self._normalize(layer, mask_BT) for layer in hidden_states] if self.layer_norm else hidden_states
        mixed = self.gamma * sum(weight * layer for weight, layer in zip(self.layer_weights(), layers, strict=True))
        return mixed.masked_fill(~mask_BT[..., None], 0) if mixed.dim() == 3 else mixed

    def _normalize(self, layer: Tensor, mask_BT: Tensor) -> Tensor:
        if self.layer_norm == "token":
            return F.layer_norm(layer, layer.shape[-1:])
        chosen_BT = mask_BT
        if self.layer_norm == "bilm":  # the original removed the markers first
            if mask_BT.dim() != 2:
                raise ValueError(
                    "`scalar_mix_layer_norm` is 'bilm', and the layers have no rows; pass `attention_mask`."
                )
            chosen_BT = mask_BT & (mask_BT.cumsum(1) > 1) & (mask_BT.flip(1).cumsum(1).flip(1) > 1)
        if not chosen_BT.any():  # only markers
            return layer
        chosen = chosen_BT if layer.dim() == 3 else chosen_BT[mask_BT]
        variance, mean = torch.var_mean(layer[chosen].float(), correction=0)
        epsilon = 1e-13 if self.layer_norm == "allennlp" else 1e-12
        return ((layer - mean) / (variance + epsilon).sqrt()).to(layer.dtype)


class ELMoModel(ELMoTokenMixin, ELMoPreTrainedModel):
    """The bidirectional language model (section 3.1) and a mix of its layers (section 3.2).

    The model is stateless: the same text gives the same vectors in any batch. State is an argument (`initial_states`)
    and a result (`final_states`), and never kept in the module.

    Args:
        config: the model's options.
        add_mixing_layer: whether to return `elmo_embeddings`. Heads have their own mixes.
    """

    _keys_to_ignore_on_load_missing = [r"scalar_mix\."]  # a language model has none; a new mix is the average
    _no_split_modules = ["ELMoLSTMLayer"]  # stays on one device, and is sharded by itself

    def __init__(self, config: ELMoConfig, add_mixing_layer: bool = True):
        super().__init__(config)
        words, width = config.vocab_size, config.word_embedding_size
        self.char_encoder = ELMoCharacterEncoder(config) if config.char_vocab_size else None
        self.word_embeddings = nn.Embedding(words, width, config.pad_token_id) if width else None
        projected = config.always_project or config.num_features != config.projection_size
        self.token_projection = nn.Linear(config.num_features, config.projection_size) if projected else None
        self.forward_lstm = ELMoLSTM(config)
        self.backward_lstm = ELMoLSTM(config)
        self.scalar_mix = ScalarMix(config) if add_mixing_layer else None
        self.vocabulary_cache: VocabularyCache | None = self.empty_cache() if config.vocabulary_cache_size else None
        self.frozen = False
        self.held_gradients: list[str] = []  # parameters whose gradients come back with `dequantize`
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        # Compared by identity: transformers may execute this file again, and then its classes are others.
        if module is self.scalar_mix:
            self.scalar_mix.reset_parameters()
        elif module is not self:
            super()._init_weights(module)
        else:
            if self.word_embeddings is not None:
                init.xavier_uniform_(self.word_embeddings.weight)
                zero_row(self.word_embeddings.weight, self.config.pad_token_id)
            if self.token_projection is not None:
                init.normal_(self.token_projection.weight, std=self.token_projection.in_features**-0.5)
                init.zeros_(self.token_projection.bias)

    def freeze(self):
        """Turns off gradients and dropout of the biLM for good, whatever `train()` says. The mix still learns."""
        self.requires_grad_(False)
        if self.scalar_mix is not None:
            self.scalar_mix.requires_grad_(True)
        self.frozen, self.held_gradients = True, []
        self.eval()

    def train(self, mode: bool = True) -> "ELMoPreTrainedModel":
        return super().train(mode and not self.frozen)

    def lstms(self) -> tuple[ELMoLSTM, ELMoLSTM]:
        """Both directions, the forward one first."""
        return self.forward_lstm, self.backward_lstm

    def get_input_embeddings(self) -> nn.Embedding:
        """The word embedding if there is one, else the character embedding."""
        return self.char_encoder.char_embeddings if self.word_embeddings is None else self.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding):
        if self.word_embeddings is None:
            self.char_encoder.char_embeddings = value
        else:
            self.word_embeddings = value

    @torch.compiler.disable  # sizes depend on the words: every text would be compiled anew, with slower kernels
    @returns_output
    def forward(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        initial_states: States | None = None,
        output_hidden_states: bool | None = None,
        unpadded: bool = False,
    ) -> ELMoModelOutput:
        """Computes contextual vectors of every token.

        Args:
            character_ids: `(batch, time, max_word_length)`, the characters of each word, from `ELMoTokenizer`. On an
                accelerator the model waits least if ids and masks stay on the CPU.
            input_ids: `(batch, time)`, word ids. Only models with word vectors read them.
            attention_mask: `(batch, time)`, 1 at real tokens, which may be at any positions. Default: all words that
                have characters (word-level models: all words but `<PAD>`).
            token_type_ids: `(batch, time)`. A new sequence begins where the type changes: two texts do not mix.
            inputs_embeds: `(batch, time, projection_size)`, token vectors instead of words.
            initial_states: `final_states` of the preceding text. Default: zeros. Their values are not checked: a NaN
                or an infinite number may turn all vectors of its row into NaN, but of no other row.
            output_hidden_states: accepted for compatibility; the model always returns all layers.
            unpadded: whether all vectors are of real tokens only, `(tokens, 2 * projection_size)`, row after row. For
                rows of very different lengths this takes much less memory.

        Raises:
            ValueError: an input has the wrong shape, has ids out of range, or contradicts another.
        """
        inputs = (character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds)
        if is_exporting():
            hidden_states, mask_BT, final_states = run_in_export(self, *inputs, initial_states)
            if unpadded:
                hidden_states = tuple(unpad(layer, mask_BT) for layer in hidden_states)
        else:
            hidden_states, mask_BT, final_states = self._run(inputs, initial_states, unpadded)
        return ELMoModelOutput(
            last_hidden_state=hidden_states[-1],
            elmo_embeddings=None if self.scalar_mix is None else self.scalar_mix(hidden_states, mask_BT),
            hidden_states=hidden_states,
            final_states=final_states,
        )

    def _run(
        self, inputs: tuple[Tensor | None, ...], initial_states: States | None, unpadded: bool
    ) -> tuple[tuple[Tensor, ...], Tensor, States | None]:
        """All layers, the token mask and the final states."""
        batch = self.read_tokens(*inputs)
        states = starting_states(self.config, initial_states, batch.words_UP, len(batch.mask_BT))
        rows_S = batch.host_packing.rows_S
        two_texts = inputs[3] is not None and len(rows_S.unique()) < len(rows_S)
        if two_texts and initial_states is not None:
            raise ValueError(
                "`initial_states` continue one text, but `token_type_ids` mark two texts in a row. Pass one text."
            )
        streams = (batch, batch.packing.forward_N), (batch, batch.packing.backward_N)
        (forward, *forward_ends), (backward, *backward_ends) = run_directions(self.lstms(), streams, states)
        final_states = None if two_texts else join_states(forward_ends, backward_ends)
        return unpack_layers(batch, forward, backward, unpadded), batch.mask_BT, final_states

    def sentence_embeddings(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """The mean of the mix over the words of each row, without markers: `(batch, 2 * projection_size)`.

        A row without words gives zeros.

        Args:
            character_ids, input_ids, attention_mask, token_type_ids: as in `forward`. `input_ids` tell the markers.
        """
        return self._words_and_mean(character_ids, input_ids, attention_mask, token_type_ids)[2][:, 0]

    def token_embeddings(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """The mix of each word; in the place of all other tokens, the mean over the words of the row.

        sentence-transformers calls this method, because the folder's `sentence_bert_config.json` names it. Its pooling
        reads the markers as well, which so change neither a mean nor a maximum.

        Args:
            character_ids, input_ids, attention_mask, token_type_ids: as in `forward`. `input_ids` tell the markers.

        Shape:
            result: `(batch, time, 2 * projection_size)`
        """
        words_BT1, mixed_BTE, mean_B1E = self._words_and_mean(character_ids, input_ids, attention_mask, token_type_ids)
        return torch.where(words_BT1, mixed_BTE, mean_B1E)

    def _words_and_mean(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        words_BT1 = word_mask(self.config, token_mask(self.config, *inputs), inputs[1], None)[..., None]
        mixed_BTE = self(*inputs, return_dict=True).elmo_embeddings
        if mixed_BTE is None:
            raise ValueError("This model has no mix: it was built with add_mixing_layer=False. Leave the argument out.")
        words_BT1 = to_device(words_BT1, mixed_BTE.device)
        sum_B1E = mixed_BTE.masked_fill(~words_BT1, 0).sum(1, keepdim=True)
        return words_BT1, mixed_BTE, sum_B1E / words_BT1.sum(1, keepdim=True).clamp(min=1)

    @torch.compiler.disable  # as `forward`
    def read_tokens(
        self, character_ids=None, input_ids=None, attention_mask=None, token_type_ids=None, inputs_embeds=None
    ) -> TokenBatch:
        """Checks the inputs of `forward`, and encodes each distinct word once, or each position if a hook is to see it.

        The host must know the lengths and the distinct words. So it reads the ids itself, which is the only time that
        it waits for an accelerator, and not at all if the inputs are on the CPU.
        """
        if inputs_embeds is None:
            character_ids, attention_mask = on_host(character_ids), on_host(attention_mask)
            input_ids = input_ids if self.word_embeddings is None else on_host(input_ids)
        mask_BT = token_mask(self.config, character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds)
        packing = pack(mask_BT.cpu(), on_host(token_type_ids))
        if inputs_embeds is not None:
            words_UP, index_N = inputs_embeds.flatten(0, 1).to(self.dtype), packing.positions_N
        elif any(map(is_hooked, self.token_encoder())):
            words_BTX = self.word_ids(character_ids, input_ids).masked_fill(~mask_BT[..., None], 0)
            words_UP, index_N = self.encode_words(words_BTX).flatten(0, 1), packing.positions_N
        else:
            words_NX = self.word_ids(character_ids, input_ids).flatten(0, 1)[packing.positions_N]
            distinct_UX, index_N = distinct_rows(words_NX)
            words_UP = self.encode_words(distinct_UX)
        device = words_UP.device
        return TokenBatch(to_device(mask_BT, device), packing.to(device), words_UP, to_device(index_N, device), packing)


class ELMoForPreTraining(ELMoScoringMixin, ELMoPreTrainedModel):
    """The biLM with its softmax, trained on the joint log-likelihood of both directions (section 3.1)."""

    accepts_loss_kwargs = True  # the losses are divided by Trainer's own number of predictions
    _tied_weights_keys = {"softmax.weight": "elmo.word_embeddings.weight"}  # with `config.tie_word_embeddings`

    def __init__(self, config: ELMoConfig):
        super().__init__(config)
        self.loss_type = "ForCausalLM"  # Trainer then counts all labels except the first of each row
        self.elmo = ELMoModel(config, add_mixing_layer=False)
        self.softmax = ELMoSoftmax(config)
        if not config.can_tie_softmax:
            self._tied_weights_keys = {}  # there is nothing to share
        self.post_init()

    @returns_output
    def forward(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        forward_targets: Tensor | None = None,
        backward_character_ids: Tensor | None = None,
        backward_input_ids: Tensor | None = None,
        backward_attention_mask: Tensor | None = None,
        backward_targets: Tensor | None = None,
        initial_states: States | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        candidates: Candidates | None = None,
    ) -> ELMoForPreTrainingOutput:
        """Computes the losses of both directions, on one text or on two independent streams.

        Args:
            character_ids, input_ids, attention_mask, initial_states: as in `ELMoModel`.
            labels: `(batch, time)`, the word id at each position (pass `input_ids`), -100 where nothing is predicted.
                They are shifted inside: forward predicts the next word, backward the preceding one.
            forward_targets, backward_targets: `(batch, time)`, instead of `labels`: the target of each position.
            backward_character_ids, backward_input_ids, backward_attention_mask: the stream of the backward direction,
                if it is not the forward text. It is in its own reading order, last word first.
            num_items_in_batch: predictions of one direction in all accumulated batches; the losses are divided by it.
                Trainer's number is right for rows padded on the right, which is the default.
            candidates: for a sampled softmax in training, from `softmax.sample()`. Pass the same candidates to all
                batches of a step, on every device. Default: drawn at this call.

        Raises:
            ValueError: labels are missing or contradict each other, or the checkpoint has no softmax.
        """
        two_streams = backward_character_ids is not None or backward_input_ids is not None
        self._check_labels(labels, forward_targets, backward_targets, two_streams)
        # The host reads all ids before the device has work, so that nothing after that waits.
        character_ids, backward_character_ids = on_host(character_ids), on_host(backward_character_ids)
        labels, forward_targets, backward_targets = map(on_host, (labels, forward_targets, backward_targets))
        batch = stream = self.elmo.read_tokens(character_ids, input_ids, attention_mask)
        orders = [batch.host_packing.forward_N, batch.host_packing.backward_N]
        if two_streams:
            stream = self.elmo.read_tokens(backward_character_ids, backward_input_ids, backward_attention_mask)
            orders[1] = stream.host_packing.forward_N
            if len(stream.mask_BT) != len(batch.mask_BT):
                rows = len(batch.mask_BT), len(stream.mask_BT)
                raise ValueError(f"The two streams have {rows[0]} and {rows[1]} rows; pass the same number.")
        states = starting_states(self.config, initial_states, batch.words_UP, len(batch.mask_BT))
        backward_order_N = stream.packing.forward_N if two_streams else batch.packing.backward_N
        (forward, *forward_ends), (backward, *backward_ends) = run_directions(
            self.elmo.lstms(), ((batch, batch.packing.forward_N), (stream, backward_order_N)), states
        )
        predictions = []
        streams = (
            (batch, orders[0], forward, forward_targets),
            (stream, orders[1], backward, backward_targets),
        )
        for direction, (tokens, order_N, outputs, aligned) in enumerate(streams):
            if labels is not None:
                targets_N = shifted_targets(labels, direction, tokens, self.config)
            elif aligned is not None:
                targets_N = _token_targets("forward_targets, backward_targets", aligned, tokens, self.config)
            else:
                continue
            predictions.append((outputs[-1], targets_N[order_N]))
        losses = self._losses(predictions, num_items_in_batch, candidates) if predictions else (None, None, None)
        show = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return ELMoForPreTrainingOutput(
            *losses,
            hidden_states=unpack_layers(batch, forward, backward) if show and not two_streams else None,
            final_states=join_states(forward_ends, backward_ends),
        )

    def _losses(self, predictions: list[tuple[Tensor, Tensor]], num_items_in_batch, candidates) -> list[Tensor]:
        """The mean of the directions' losses, which has the gradient, and each loss. Targets are on the CPU."""
        hidden, targets, scales = [], [], []
        for hidden_NP, targets_N in predictions:
            predicted_M = (targets_N != -100).nonzero()[:, 0]
            count = max(1, len(predicted_M)) if num_items_in_batch is None else num_items_in_batch
            rows_M = to_device(predicted_M, hidden_NP.device)
            hidden.append(F.dropout(hidden_NP, self.config.dropout, self.training)[rows_M])
            targets.append(targets_N[predicted_M])
            dtype = torch.promote_types(hidden_NP.dtype, torch.float32)
            scales.append(hidden_NP.new_ones(len(rows_M), dtype=dtype) / count)
        scale_N = torch.cat(scales) / len(predictions)
        # One call for both directions: they share the softmax and the candidates of a sampled softmax.
        loss, losses_N = self.softmax(torch.cat(hidden), torch.cat(targets), scale_N, candidates)
        own = (len(predictions) * scale_N * losses_N).split([len(scale) for scale in scales])
        return [loss, *(losses.sum() for losses in own)]

    def _check_labels(self, labels, forward_targets, backward_targets, two_streams: bool):
        targets = {"forward_targets": forward_targets, "backward_targets": backward_targets}
        aligned = [name for name, given in targets.items() if given is not None]
        if labels is not None and (aligned or two_streams):
            raise ValueError(
                "`labels` are shifted inside and need one text; with two streams or aligned targets pass "
                "`forward_targets` and `backward_targets` instead."
            )
        if len(aligned) == 1:
            raise ValueError(f"Received `{aligned[0]}` alone; pass `forward_targets` and `backward_targets` together.")
        if labels is not None or aligned:
            self.check_vocabulary()


def _token_targets(name: str, given: Tensor, batch: TokenBatch, config: ELMoConfig) -> Tensor:
    """The entry `(N,)` of `given` `(batch, time)` at each real token, in reading order, after a check; on the CPU."""
    check_ids(name, given, tuple(batch.mask_BT.shape))
    words_N = given.flatten()[batch.host_packing.positions_N].long()
    check_targets(name, words_N[words_N != -100], config)
    return words_N


def shifted_targets(labels: Tensor, direction: int, batch: TokenBatch, config: ELMoConfig) -> Tensor:
    """The target `(N,)` of each real token in reading order: the label of its neighbor, or -100 without one."""
    words_N = _token_targets("labels", labels, batch, config)
    here_M, there_M = neighbor_tokens(direction, batch)
    return torch.full_like(words_N, -100).index_copy_(0, here_M, words_N[there_M])
