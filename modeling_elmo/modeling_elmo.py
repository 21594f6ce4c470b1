"""ELMo, section 3 of the paper from top to bottom (Peters et al. 2018, https://arxiv.org/abs/1802.05365).

    3.1, 3.4  characters -> features of a word     ELMoCharacterEncoder, ELMoHighway
    3.1       a step of an LSTM, its layers        ELMoLSTMLayer, ELMoLSTM
    3.2       the layers become one vector         ScalarMix, equation (1)
    3.1, 3.2  both directions, all layers          ELMoModel
    3.1       the joint log-likelihood             ELMoForPreTraining

The plain definition is in this file. To step through it, set a breakpoint at any line and compute inside
`with elmo_backend("reference"):`. Elsewhere, other code computes the same faster: tables of convolutions and a cache of
words (`encoder.py`), both directions at once (`directions.py`), and products and cells (`kernels/`). The softmax over
words, full, sampled or adaptive, is in `softmax.py`.

Where the paper is silent, bilm-tf, the program of its authors, decides:

- the widths and numbers of the filters, and relu (or tanh) after the maximum, not before it;
- `carry` is its name for the gate that Srivastava et al. call transform;
- the cell is bounded to +-3, and so is the projected state; `initial_states` continue with the projected state before
  the skip connection;
- TensorFlow's forget gate has a bias of 1, here `forget_bias`; the order of the gates is i, f, o, g here, so that the
  three sigmoids are neighbors (TensorFlow: i, g, f, o), and converted checkpoints are reordered;
- the token layer is in `hidden_states` twice, `[x_k; x_k]`: it has 512 values and each other layer 1,024, 512 of each
  direction, and a sum needs equal widths.

Section 3.4 has the sizes: 2 layers of 4,096 units, projected to 512; 2,048 filters, 2 highway layers.

Initial values, by parameter:

    character embeddings           U(-1, 1), padding 0                 bilm-tf
    filters                        U(-0.05, 0.05); tanh: N(0, 1 / n)   bilm-tf
    highway, token projection      N(0, 1 / n)                         bilm-tf
    bias of `carry`                -2, so that words pass at first     Srivastava et al. 2015
    gates of an LSTM               Glorot-uniform over [x; h]          Glorot and Bengio 2010, TensorFlow's default
    projection of an LSTM          Glorot-uniform                      the same
    word embeddings                Glorot-uniform, padding 0           the same
    all other biases               0

with n inputs of a unit. Words are packed: a step has the sequences that are still running, and nothing is computed for
padding.

Shape suffixes: N real tokens of a batch, in the order in which an LSTM reads them; S sequences, longest first; U
distinct words, or each position of a text; X the ids of a word (`max_word_length` characters, after the word's id if
the model has word vectors); P `projection_size`; H `lstm_hidden_size`; G = 4 H; L layers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .base import ELMoPreTrainedModel, zero_row
from .configuration_elmo import ELMoConfig
from .directions import lstm_kernel, run_at_once
from .encoder import (
    VocabularyCache,
    VocabularyCacheMixin,
    cropped,
    maxima_from_tables,
    maxima_in_few_sizes,
    pack_words,
)
from .exporting import run_in_export
from .inputs import (
    NO_LABEL,
    PackedBatch,
    States,
    check_ids,
    forward_of_model,
    join_states,
    on_host,
    pack,
    starting_states,
    states_of_rows,
    states_of_sequences,
    token_mask,
    unpack_layers,
    unpad,
    word_mask,
)
from .kernels.plan import forced_backend, is_accelerator, make_plan
from .kernels.products import fast_linear
from .kernels.sequences import Kernel, LSTMOutput, LSTMWeights, Stream
from .kernels.torch_state import (
    fetched,
    is_exporting,
    is_hooked,
    is_unmodified,
    product_dtype,
    to_device,
    to_device_at_once,
)
from .model_outputs import ELMoForPreTrainingOutput, ELMoModelOutput
from .scoring import ELMoScoringMixin, check_targets, neighbor_tokens
from .softmax import Candidates, ELMoSoftmax


class ELMoCharacterEncoder(nn.Module):
    """Convolutions over a word's characters, the maximum of each over positions, and highway layers (Kim et al. 2015).

    Shape:
        characters: `(..., max_word_length)`, ids.
        result: `(..., filters)`.
    """

    def __init__(self, config: ELMoConfig):
        super().__init__()
        filters = config.char_cnn_filters
        self.char_embeddings = nn.Embedding(config.char_vocab_size, config.char_embedding_size, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(config.char_embedding_size, n, width) for width, n in filters)
        size = sum(number for _, number in filters)
        self.highways = nn.ModuleList(ELMoHighway(size) for _ in range(config.num_highway_layers))
        self.activation = torch.relu if config.char_cnn_activation == "relu" else torch.tanh
        self.widest = max(width for width, _ in filters)

    def forward(self, characters: Tensor) -> Tensor:
        """A list of words, `(words, max_word_length)`, is cropped. Tables replace convolutions where that is faster.

        A text, `(batch, time, max_word_length)`, passes the modules as it is: for hooks, which see all of it, and for
        `torch.export`.
        """
        is_list = characters.dim() == 2 and len(characters) > 0
        weight = self.char_embeddings.weight
        backend = make_plan([self.char_embeddings, *self.convolutions], weight).backend
        if is_list and backend != "reference":
            maxima = maxima_from_tables(self.char_embeddings, self.convolutions, characters)
        elif is_list and is_accelerator(weight.device) and forced_backend() != "reference":
            maxima = maxima_in_few_sizes(self.char_embeddings, self.convolutions, characters, self.widest)
        else:
            maxima = self.convolve(characters)
        features = self.activation(maxima)
        features = features.to(product_dtype(features))
        for highway in self.highways:
            features = highway(features)
        return features

    def convolve(self, characters: Tensor) -> Tensor:
        """The maximum of each filter over its positions in a word, `(..., filters)`."""
        if characters.dim() == 2:
            characters = cropped(characters, self.widest)
        characters = to_device(characters, self.char_embeddings.weight.device)
        embedded = self.char_embeddings(characters).flatten(0, -3).transpose(1, 2)  # (words, char size, length)
        maxima = []
        for convolution in self.convolutions:
            maxima.append(convolution(embedded).amax(-1))
        return torch.cat(maxima, dim=-1).unflatten(0, characters.shape[:-1])

    def initialize_parameters(self):
        init.uniform_(self.char_embeddings.weight, -1, 1)
        zero_row(self.char_embeddings.weight, 0)
        for convolution in cast(Iterable[nn.Conv1d], self.convolutions):
            if self.activation is torch.relu:
                init.uniform_(convolution.weight, -0.05, 0.05)
            else:
                init.normal_(convolution.weight, std=convolution.weight[0].numel() ** -0.5)
            init.zeros_(convolution.bias)


class ELMoHighway(nn.Module):
    """Highway layer (Srivastava et al. 2015): `y = g * relu(T x + t) + (1 - g) * x`, `g = sigmoid(C x + c)`."""

    def __init__(self, size: int):
        super().__init__()
        self.transform = nn.Linear(size, size)
        self.carry = nn.Linear(size, size)

    def forward(self, features: Tensor) -> Tensor:
        transformed = fast_linear(self.transform, features).relu()
        gate = fast_linear(self.carry, features).sigmoid()
        return torch.lerp(features, transformed, gate)

    def initialize_parameters(self):
        for linear, bias in ((self.transform, 0), (self.carry, -2)):
            init.normal_(linear.weight, std=linear.in_features**-0.5)
            init.constant_(linear.bias, bias)


class ELMoLSTMLayer(nn.Module):
    """One layer of one direction: an LSTM with a projection (Sak et al. 2014) and with bounds.

        i, f, o, g = x_t W_ih + h_{t-1} W_hh + b
        c_t = clip(sigmoid(i) * tanh(g) + sigmoid(f + forget_bias) * c_{t-1}, cell_clip)
        h_t = clip((sigmoid(o) * tanh(c_t)) W_proj, projection_clip)

    Without a projection (`config.has_projection` is False) `h_t` is `sigmoid(o) * tanh(c_t)` itself, unclipped. The
    weights are in `nn.Linear` modules, so that adapters and quantizers find them.
    """

    def __init__(self, config: ELMoConfig):
        super().__init__()
        inner, outer = config.lstm_hidden_size, config.projection_size
        self.input_linear = nn.Linear(outer, 4 * inner)
        self.state_linear = nn.Linear(outer, 4 * inner, bias=False)
        self.projection = nn.Linear(inner, outer, bias=False) if config.has_projection else None
        self.forget_bias = config.forget_bias
        self.cell_clip = config.cell_clip
        self.projection_clip = config.projection_clip if config.has_projection else None

    def step(self, gates_SG: Tensor, hidden_SP: Tensor, cell_SH: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden state and the cell after a step, from the input half of the gates. Cells are never half precision.

        Shape:
            gates_SG: `(S, 4 * lstm_hidden_size)`, `x_t W_ih + b`.
            hidden_SP, cell_SH: `(S, projection_size)` and `(S, lstm_hidden_size)`, before the step.
        """
        dtype = gates_SG.dtype
        gates_SG = (gates_SG + self.state_linear(hidden_SP)).to(cell_SH.dtype)
        i, f, o, g = gates_SG.chunk(4, dim=-1)
        cell_SH = i.sigmoid() * g.tanh() + (f + self.forget_bias).sigmoid() * cell_SH
        if self.cell_clip is not None:
            cell_SH = cell_SH.clamp(-self.cell_clip, self.cell_clip)
        hidden_SP = (o.sigmoid() * cell_SH.tanh()).to(dtype)
        if self.projection is not None:
            hidden_SP = self.projection(hidden_SP)
        if self.projection_clip is not None:
            hidden_SP = hidden_SP.clamp(-self.projection_clip, self.projection_clip)
        return hidden_SP, cell_SH

    @torch.compiler.disable  # a traced time loop would be compiled again for every length
    def forward(self, stream: Stream, hidden_SP: Tensor, cell_SH: Tensor) -> LSTMOutput:
        """Returns the projected state at every step, and the state after each sequence's end."""
        if not stream.steps.batch_sizes:
            return stream.inputs.new_empty(0, hidden_SP.shape[-1]), hidden_SP, cell_SH
        kernel = lstm_kernel(list(self.children()), stream.inputs, hidden_SP, cell_SH)
        if kernel is not None:
            return kernel(self.weights(), stream, hidden_SP, cell_SH)
        return self.scan(stream, hidden_SP, cell_SH)

    def scan(self, stream: Stream, hidden_SP: Tensor, cell_SH: Tensor) -> LSTMOutput:
        """`step` by step: differentiable, for every device and dtype. A sequence that ends leaves the state's rows."""
        outputs, ended = [], []
        for gates_SG in self.input_linear(stream.tokens_ND).split(stream.steps.batch_sizes):
            running = len(gates_SG)
            if running < len(hidden_SP):
                ended.append((hidden_SP[running:], cell_SH[running:]))
            hidden_SP, cell_SH = self.step(gates_SG, hidden_SP[:running], cell_SH[:running])
            outputs.append(hidden_SP)
        ended.append((hidden_SP, cell_SH))
        final_hidden, final_cell = zip(*reversed(ended), strict=True)
        return torch.cat(outputs), torch.cat(final_hidden), torch.cat(final_cell)

    def weights(self) -> LSTMWeights:
        """What kernels read."""
        linears = self.input_linear, self.state_linear, self.projection
        return LSTMWeights(*linears, self.forget_bias, self.cell_clip, self.projection_clip)

    def initialize_parameters(self):
        gates, size = self.input_linear.weight.shape
        bound = (6 / (2 * size + gates)) ** 0.5
        init.uniform_(self.input_linear.weight, -bound, bound)
        init.uniform_(self.state_linear.weight, -bound, bound)
        init.zeros_(self.input_linear.bias)
        if self.projection is not None:
            init.xavier_uniform_(self.projection.weight)


class ELMoLSTM(nn.Module):
    """All layers of one direction: a layer reads the one below it, and from the second on, adds its input."""

    def __init__(self, config: ELMoConfig):
        super().__init__()
        self.layers = nn.ModuleList(ELMoLSTMLayer(config) for _ in range(config.num_hidden_layers))
        self.use_skip_connections = config.use_skip_connections
        self.dropout = config.dropout

    def forward(
        self, stream: Stream, hidden_LSP: Tensor, cell_LSH: Tensor, kernel: Kernel | None = None
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Runs packed tokens through the layers.

        Args:
            stream: the tokens, in the order in which this direction reads them.
            hidden_LSP, cell_LSH: the state at the start.
            kernel: computes each layer. Default: the layers are called, and each chooses.

        Returns:
            The output of each layer, `(N, projection_size)`, and the states after each sequence's end.
        """
        outputs, states = [], []
        for depth, layer in enumerate(cast(Iterable[ELMoLSTMLayer], self.layers)):
            if self.training and self.dropout:  # separate for each token, not for each distinct word
                stream = Stream(F.dropout(stream.tokens_ND, self.dropout), stream.steps)
            start = hidden_LSP[depth], cell_LSH[depth]
            if kernel is None:
                output_NP, *state = layer(stream, *start)
            else:
                output_NP, *state = kernel(layer.weights(), stream, *start)
            if depth and self.use_skip_connections:
                output_NP = output_NP + stream.inputs  # not in place: kernels return views
            outputs.append(output_NP)
            states.append(state)
            stream = Stream(output_NP, stream.steps)
        hidden, cell = zip(*states, strict=True)
        return outputs, torch.stack(hidden), torch.stack(cell)


class ScalarMix(nn.Module):
    """Mixes all layers into one vector per token: `gamma * sum_j softmax(s)_j h_j` (equation 1).

    `scalar_mix_mode` can fix the weights: `"average"`, `"top"`, or the number of one layer. Gamma is always learned.
    Exclude both from weight decay, which would pull gamma to 0. `scalar_mix_l2` is the paper's regularization.
    """

    def __init__(self, config: ELMoConfig):
        super().__init__()
        self.mode = config.scalar_mix_mode
        self.num_layers = config.num_hidden_layers + 1
        self.layer_norm = config.scalar_mix_layer_norm
        self.l2 = config.scalar_mix_l2
        self.weights = nn.Parameter(torch.zeros(self.num_layers)) if self.mode == "learned" else None
        self.gamma = nn.Parameter(torch.ones(1))

    def initialize_parameters(self):
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
        return self(None)  # an offloaded or sharded parameter can be read only inside the call of its module

    def forward(self, hidden_states: tuple[Tensor, ...] | None, attention_mask: Tensor | None = None) -> Tensor:
        """Mixes the layers, each `(batch, time, width)`; zeros where `attention_mask` `(batch, time)` is 0.

        The layers may also have the real tokens only, `(tokens, width)`, and the mix has then, too; the layer norm
        `"bilm"` then needs the mask, which shows the rows.
        """
        if hidden_states is None:
            weights = self.gamma.new_zeros(1) if self.weights is None else self.weights
            return self.l2 * weights.square().sum()
        if len(hidden_states) != self.num_layers:
            raise ValueError(
                f"ScalarMix received {len(hidden_states)} layers; pass all {self.num_layers} of `hidden_states`."
            )
        if attention_mask is None:
            attention_mask = hidden_states[0].new_ones(hidden_states[0].shape[:-1])
        mask_BT = attention_mask.bool()
        layers = hidden_states
        if self.layer_norm:
            layers = tuple(self._normalize(layer, mask_BT) for layer in hidden_states)
        # equation (1): s_j are the softmax-normalized weights
        mixed = self.gamma * sum(s_j * h_j for s_j, h_j in zip(self.layer_weights(), layers, strict=True))
        if mixed.dim() == 3:
            mixed = mixed.masked_fill(~mask_BT[..., None], 0)
        return mixed

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


class BothDirections(NamedTuple):
    """What `ELMoModel.run` returns.

    Shape:
        forward, backward: `(N, projection_size)`, the output of each layer, in the order in which its LSTM reads.
        final_states: as in `ELMoModelOutput`.
    """

    forward: list[Tensor]
    backward: list[Tensor]
    final_states: States


class ELMoModel(VocabularyCacheMixin, ELMoPreTrainedModel):
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

    def initialize_parameters(self):
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

    def get_input_embeddings(self) -> nn.Embedding:
        """The word embedding if there is one, else the character embedding."""
        return self.char_encoder.char_embeddings if self.word_embeddings is None else self.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding):
        if self.word_embeddings is None:
            self.char_encoder.char_embeddings = value
        else:
            self.word_embeddings = value

    @torch.compiler.disable  # sizes depend on the words: every text would be compiled anew, with slower kernels
    @forward_of_model
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
            unpadded: whether to return real tokens only, row after row: `(tokens, 2 * projection_size)`. This takes
                much less memory if the lengths of the rows differ much.

        Raises:
            ValueError: an input has the wrong shape, has ids out of range, or contradicts another.
        """
        inputs = (character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds)
        if is_exporting():
            hidden_states, mask, final_states = run_in_export(self, *inputs, initial_states)
            if unpadded:
                hidden_states = tuple(unpad(layer, mask) for layer in hidden_states)
        else:
            batch = self.read_tokens(*inputs)
            has_two_texts = token_type_ids is not None and batch.has_two_texts()
            if has_two_texts and initial_states is not None:
                raise ValueError(
                    "`initial_states` continue one text, but `token_type_ids` mark two texts in a row. Pass one text."
                )
            both = self.run(batch, initial_states=initial_states)
            mask, final_states = batch.mask_BT, None if has_two_texts else both.final_states
            hidden_states = unpack_layers(batch, both.forward, both.backward, unpadded)
        return ELMoModelOutput(
            last_hidden_state=hidden_states[-1],
            elmo_embeddings=None if self.scalar_mix is None else self.scalar_mix(hidden_states, mask),
            hidden_states=hidden_states,
            final_states=final_states,
        )

    @torch.compiler.disable  # as `forward`
    def read_tokens(
        self,
        character_ids=None,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        inputs_embeds=None,
        packed_batch: PackedBatch | None = None,
    ) -> PackedBatch:
        """Checks the inputs of `forward`, and encodes each distinct word once, or each position if a hook is to see it.

        The host must know the lengths and the distinct words. So it reads the ids itself, which is the only time that
        it waits for an accelerator, and not at all if the inputs are on the CPU, or are packed.
        """
        inputs = character_ids, input_ids, attention_mask, token_type_ids
        if inputs_embeds is not None:
            batch = pack(token_mask(self.config, *inputs, inputs_embeds).cpu(), on_host(token_type_ids))
            batch.index_N = batch.positions_N
            return batch.encoded(inputs_embeds.flatten(0, 1).to(self.dtype))
        batch = pack_words(self.config, *inputs) if packed_batch is None else packed_batch
        if not any(map(is_hooked, self.token_encoder())):
            return batch.encoded(self.encode_words(batch.ids_UX))
        words_UP = self.encode_words(batch.ids_BTX()).flatten(0, 1)
        return replace(batch, index_N=batch.positions_N).encoded(words_UP)

    def compute_words(self, words_UX: Tensor) -> Tensor:
        """Token vectors `x_k` `(..., projection_size)` of rows of ids, as `word_ids` makes them.

        `encode_words` checks the ids, and looks up what `cache_vocabulary` has computed.
        """
        features = []
        if self.word_embeddings is not None:
            features.append(self.word_embeddings(to_device(words_UX[..., 0], self.word_embeddings.weight.device)))
        if self.char_encoder is not None:
            characters = words_UX if self.word_embeddings is None else words_UX[..., 1:]
            features.append(self.char_encoder(characters))
        token_vectors = torch.cat(features, dim=-1)
        if self.token_projection is not None:
            token_vectors = fast_linear(self.token_projection, token_vectors)
        return token_vectors

    @torch.compiler.disable  # as `forward`
    def run(
        self, batch: PackedBatch, other: PackedBatch | None = None, initial_states: States | None = None
    ) -> BothDirections:
        """Both LSTMs (section 3.1): the forward one over a batch, and the backward one over the same from its end.

        Args:
            other: what the backward LSTM reads instead, in its own reading order.
            initial_states: as in `forward`.
        """
        states = starting_states(self.config, initial_states, batch.words_UP, batch.shape[0])
        lstms = self.forward_lstm, self.backward_lstm
        streams = batch.left_to_right(), batch.right_to_left() if other is None else other.left_to_right()
        rows = batch.rows_S, (other or batch).rows_S
        starts = [states_of_sequences(states, direction, rows_S) for direction, rows_S in enumerate(rows)]
        results = None
        if self.has_own_lstms():
            results = run_at_once(lstms, streams, starts)
        if results is None:
            results = [lstm(stream, *start) for lstm, stream, start in zip(lstms, streams, starts, strict=True)]
        (forward, *forward_ends), (backward, *backward_ends) = results
        forward_states = states_of_rows(states, 0, rows[0], forward_ends)
        backward_states = states_of_rows(states, 1, rows[1], backward_ends)
        return BothDirections(forward, backward, join_states(forward_states, backward_states))

    def has_own_lstms(self) -> bool:
        """Whether kernels may read the weights of all LSTMs: no module is wrapped or hooked, so that it must be called.

        Their linear layers are looked at where a kernel is chosen.
        """
        modules = [self.forward_lstm, *self.forward_lstm.layers, self.backward_lstm, *self.backward_lstm.layers]
        return all(is_unmodified(module, (ELMoLSTM, ELMoLSTMLayer)) for module in modules)

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
            character_ids, input_ids, attention_mask, token_type_ids: as in `forward`. `input_ids` show the markers.
        """
        return self._words_and_mean(character_ids, input_ids, attention_mask, token_type_ids)[2][:, 0]

    def token_embeddings(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """The mix of each word; for all other tokens, the mean over the words of the row.

        sentence-transformers calls this method, because the folder's `sentence_bert_config.json` names it. Its pooling
        also reads the markers; this way they change neither the mean nor the maximum.

        Args:
            character_ids, input_ids, attention_mask, token_type_ids: as in `forward`. `input_ids` show the markers.

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

    @forward_of_model
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
        packed_batch: PackedBatch | None = None,
        backward_packed_batch: PackedBatch | None = None,
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
            packed_batch, backward_packed_batch: from `pack_words`, instead of the ids and the mask of a text or stream.

        Raises:
            ValueError: labels are missing or contradict each other, or the checkpoint has no softmax.
        """
        raw = character_ids, input_ids, attention_mask
        backward_raw = backward_character_ids, backward_input_ids, backward_attention_mask
        two_streams = any(each is not None for each in (*backward_raw[:2], backward_packed_batch))
        self._check_labels(labels, forward_targets, backward_targets, two_streams)
        for packed, others in (packed_batch, raw), (backward_packed_batch, backward_raw):
            if packed is not None and any(each is not None for each in others):
                raise ValueError(
                    "A packed batch has the ids of its words and no padding; pass it without ids and `attention_mask`."
                )
        # The host reads all ids before the device has work, so that nothing after that waits.
        character_ids, backward_character_ids = on_host(character_ids), on_host(backward_character_ids)
        labels, forward_targets, backward_targets = map(on_host, (labels, forward_targets, backward_targets))
        read = self.elmo.read_tokens
        batch, other = read(character_ids, input_ids, attention_mask, packed_batch=packed_batch), None
        if two_streams:
            ids = backward_character_ids, backward_input_ids, backward_attention_mask
            other = read(*ids, packed_batch=backward_packed_batch)
            if other.shape[0] != batch.shape[0]:
                rows = batch.shape[0], other.shape[0]
                raise ValueError(f"The two streams have {rows[0]} and {rows[1]} rows; pass the same number.")
        both = self.elmo.run(batch, other, initial_states)
        losses: Sequence[Tensor | None] = (None, None, None)
        if labels is not None or forward_targets is not None:
            if labels is not None:
                forward_N = shifted_targets(labels, 0, batch, self.config)
                backward_N = shifted_targets(labels, 1, batch, self.config)
            else:
                names = "forward_targets, backward_targets"
                forward_N = _token_targets(names, forward_targets, batch, self.config)
                backward_N = _token_targets(names, backward_targets, other or batch, self.config)
            forward_order_N = batch.host.forward_N
            backward_order_N = batch.host.backward_N if other is None else other.host.forward_N
            predictions = [
                (both.forward[-1], forward_N[forward_order_N]),
                (both.backward[-1], backward_N[backward_order_N]),
            ]
            losses = self._losses(predictions, num_items_in_batch, candidates)
        show = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return ELMoForPreTrainingOutput(
            *losses,
            hidden_states=unpack_layers(batch, both.forward, both.backward) if show and not two_streams else None,
            final_states=both.final_states,
        )

    def _losses(self, predictions: list[tuple[Tensor, Tensor]], num_items_in_batch, candidates) -> list[Tensor]:
        """The mean of the directions' losses, which has the gradient, and each loss.

        A loss is the mean of `-log p(t_k | the words before, or after, t_k)` over the predictions of a direction.

        Args:
            predictions: by direction, the top layer `(N, projection_size)` and the targets `(N,)`, on the CPU.
        """
        hidden, targets, scales = [], [], []
        predicted = [(targets_N != NO_LABEL).nonzero()[:, 0] for _, targets_N in predictions]
        on_device = to_device_at_once(predicted, predictions[0][0].device)
        for (hidden_NP, targets_N), predicted_N, rows_N in zip(predictions, predicted, on_device, strict=True):
            count = max(1, len(predicted_N)) if num_items_in_batch is None else num_items_in_batch
            dropped_NP = F.dropout(hidden_NP, self.config.dropout, self.training)
            hidden.append(dropped_NP.index_select(0, rows_N))
            targets.append(targets_N[predicted_N])
            dtype = torch.promote_types(hidden_NP.dtype, torch.float32)
            scales.append(hidden_NP.new_ones(len(rows_N), dtype=dtype) / count)
        scale_N = torch.cat(scales) / len(predictions)
        # One call for both directions: they share the softmax and the candidates of a sampled softmax.
        loss, losses_N = self.softmax(torch.cat(hidden), torch.cat(targets), scale_N, candidates)
        by_direction = (len(predictions) * scale_N * losses_N).split([len(scale) for scale in scales])
        return [loss, *(losses.sum() for losses in by_direction)]

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
            self.prepare_softmax()


def _token_targets(name: str, given: Tensor, batch: PackedBatch, config: ELMoConfig) -> Tensor:
    """The entry `(N,)` of `given` `(batch, time)` at each real token, in reading order, after a check; on the CPU."""
    check_ids(name, given, tuple(batch.shape))
    words_N = given.flatten()[batch.host.positions_N].long()
    check_targets(name, words_N[words_N != NO_LABEL], config)
    return words_N


def shifted_targets(labels: Tensor, direction: int, batch: PackedBatch, config: ELMoConfig) -> Tensor:
    """The target `(N,)` of each real token in reading order: the label of its neighbor, or -100 without one."""
    words_N = _token_targets("labels", labels, batch, config)
    here_M, there_M = neighbor_tokens(direction, batch)
    return torch.full_like(words_N, NO_LABEL).index_copy_(0, here_M, words_N[there_M])
