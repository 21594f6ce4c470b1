"""Semantic role labeling on ELMo (Peters et al. 2018, section 4): the network of He et al. 2017.

Shape suffixes: B batch; T time; N real tokens of the batch; D width of the words that the network reads; K labels; U
distinct texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils import ModelOutput

from ..configuration_elmo import ELMoConfig
from ..encoder import distinct_rows
from ..inputs import NO_LABEL, check_ids, pad, unpad, word_mask
from .crf import check_bio, decode_labels
from .interleaved import InterleavedLSTM
from .packed_texts import Texts, rows_as_texts, with_elmo
from .recurrence import TaskLSTM
from .task_model import ELMoTaskModel, reads_batch

MARK_SIZE = 100  # width of the vector that marks the predicate (He et al. 2017)
NO_WORD = -1e4  # score of a predicate where there is no word: probability 0, also in half precision


@dataclass
class ELMoSemanticRoleOutput(ModelOutput):
    """Output of `ELMoForSemanticRoleLabeling`.

    Shape:
        loss: `()`, the mean cross-entropy of the role labels, plus the mean binary cross-entropy of the predicate
            labels, plus the penalty on the layer weights. A mean over no label is 0.
        logits: `(batch, time, num_labels)`, the log-probability of each label at each word.
        predicate_logits: `(batch, time)`, above 0 at words that are predicates, very low where there is no word.
        predictions: `(batch, time)`, in eval mode the best BIO sequence of each row, -100 where there is no word.
            Meaningless in a row without a marked predicate.
        hidden_states: as in `ELMoModelOutput`, on request.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    predicate_logits: Tensor | None = None
    predictions: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class ELMoForSemanticRoleLabeling(ELMoTaskModel):
    """Labels the roles of each word for a given predicate, and finds predicates.

    Roles: interleaved highway LSTMs over `[x_k; ELMo_k; mark_k]` and a linear layer, without a CRF; `mark_k` is one of
    two vectors, for the predicate and for other words. Predicates: a biLSTM over `[x_k; ELMo_k]` and a linear layer,
    trained together with the roles (the ELMo paper takes the predicates as given). With `head="linear"`, both are only
    the linear layer.

    A row has one text and one predicate. With a frozen biLM, rows with the same text share one pass of the biLM.
    """

    network = "roles"
    custom_pipelines = {
        "semantic-role-labeling": {
            "impl": "modeling_elmo.ELMoSemanticRolePipeline",
            "pt": ["AutoModelForTokenClassification"],
        }
    }
    accepts_loss_kwargs = True

    def __init__(self, config: ELMoConfig):
        super().__init__(config)
        check_bio(self.label_names())
        self.mark_embedding = nn.Embedding(2, MARK_SIZE)
        self.encoder = None
        self.predicate_encoder = None
        size = self.input_size + MARK_SIZE
        predicate_size = self.input_size
        if not self.is_linear:
            self.encoder = InterleavedLSTM(size, self.task_hidden_size, self.task_num_layers, self.task_dropout)
            self.predicate_encoder = TaskLSTM(predicate_size, max(1, self.task_hidden_size // 3))
            size = self.encoder.output_size + self.output_elmo_size
            predicate_size = self.predicate_encoder.output_size + self.output_elmo_size
        self.classifier = nn.Linear(size, config.num_labels)
        self.predicate_classifier = nn.Linear(predicate_size, 1)
        self.post_init()

    def label_layers(self) -> list[nn.Module]:
        return [self.classifier]

    def choose_labels(self, labels: Sequence[str]):
        check_bio(tuple(labels))
        super().choose_labels(labels)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        if module is self.mark_embedding:
            init.xavier_uniform_(self.mark_embedding.weight)
        else:
            super()._init_weights(module)

    @reads_batch
    def forward(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        elmo_hidden_states: Tensor | None = None,
        labels: Tensor | None = None,
        predicate_labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> ELMoSemanticRoleOutput:
        """Computes the log-probability of every role label and the score of every word as a predicate, and the loss.

        Args:
            character_ids, input_ids, attention_mask, inputs_embeds: as in `ELMoModel`. `input_ids` show which
                tokens are markers.
            token_type_ids: `(batch, time)`, 1 at the predicate's first word, else 0. The biLM does not read them. A row
                without a 1 is only searched for predicates.
            elmo_hidden_states, output_hidden_states: as in `ELMoForTokenClassification`.
            labels: `(batch, time)`, ids of BIO role labels, -100 where there is none or it is unknown.
            predicate_labels: `(batch, time)`, 1 at predicates, 0 at other words, -100 where unknown. Give the labels of
                a text in one of its rows, so that each counts once.
            num_items_in_batch: number of role labels in all accumulated batches. The loss is then this batch's share:
                the sum of the roles' losses over this number, and the other parts by the share of role labels.
        """
        inputs = self.read(character_ids, input_ids, attention_mask, None, inputs_embeds, elmo_hidden_states)
        words_BT = word_mask(self.config, inputs.mask_BT, input_ids, inputs_embeds)
        marks_BT = self._checked_marks(token_type_ids, words_BT)
        texts = rows_as_texts(inputs.mask_BT)
        marks_ND = self.mark_embedding(unpad(marks_BT, inputs.mask_BT))
        marked_ND = torch.cat([inputs.tokens_ND, marks_ND], dim=-1)
        roles_NK = self._scores(self.encoder, self.classifier, marked_ND, texts, inputs.output_NE)
        predicate_N1 = self._scores(
            self.predicate_encoder, self.predicate_classifier, inputs.tokens_ND, texts, inputs.output_NE
        )
        logits = pad(roles_NK, inputs.mask_BT).log_softmax(-1)
        predicate_BT = pad(predicate_N1, inputs.mask_BT).squeeze(-1)
        predicate_BT = predicate_BT.masked_fill(~words_BT, NO_WORD)
        if labels is None and marks_BT.any():
            self._warn_without_labels("the loss of roles and predicates")
        loss = None
        if labels is not None or predicate_labels is not None:
            role_loss, share = self._role_loss(logits, labels, marks_BT, words_BT, num_items_in_batch)
            predicate_loss = self._predicate_loss(predicate_BT, predicate_labels, words_BT)
            loss = role_loss + share * (predicate_loss + self.penalty())
        return ELMoSemanticRoleOutput(
            loss=loss,
            logits=logits,
            predicate_logits=predicate_BT,
            predictions=None if self.training else decode_labels(logits, words_BT, self.label_names()),
            hidden_states=self._requested(inputs, output_hidden_states),
        )

    def bilm_layers(self, inputs: tuple[Tensor | None, ...], mask_BT: Tensor) -> tuple[Tensor, ...]:
        """As in `ELMoTaskModel`. Equal rows are computed once if the biLM is frozen."""
        *words, inputs_embeds = inputs
        if not self.elmo.frozen or inputs_embeds is not None or not len(mask_BT):
            return super().bilm_layers(inputs, mask_BT)
        ids = [tensor.flatten(1).long() for tensor in words if tensor is not None]
        _, text_B = distinct_rows(torch.cat(ids, 1))
        first_B = (text_B[:, None] == text_B).byte().argmax(1)  # the first row with the same text
        rows_U, index_B = first_B.unique(return_inverse=True)
        distinct = tuple(None if tensor is None else tensor[rows_U] for tensor in inputs)
        mask_UT = mask_BT[rows_U]
        layers = super().bilm_layers(distinct, mask_UT)
        numbers_UT = (mask_UT.flatten().cumsum(0) - 1).view_as(mask_UT)
        numbers_N = unpad(numbers_UT[index_B], mask_BT)
        return tuple(layer[numbers_N] for layer in layers)

    def _scores(
        self,
        encoder: nn.Module | None,
        classifier: nn.Module,
        words_ND: Tensor,
        texts: Texts,
        output_NE: Tensor | None,
    ) -> Tensor:
        """A linear layer on the words themselves, or on their encoder's output and ELMo.

        In float32 at least: losses and probabilities are not computed in half precision.
        """
        if encoder is not None:
            hidden_NH = with_elmo(encoder(texts.pack(words_ND), texts), texts, output_NE)
            words_ND = texts.unpack(hidden_NH, len(words_ND))
        scores_NK = classifier(words_ND)
        return scores_NK.to(torch.promote_types(scores_NK.dtype, torch.float32))

    def _checked_marks(self, token_type_ids: Tensor | None, words_BT: Tensor) -> Tensor:
        """`(batch, time)`, 1 at each row's predicate."""
        if token_type_ids is None:
            return torch.zeros_like(words_BT, dtype=torch.long)
        check_ids("token_type_ids", token_type_ids, tuple(words_BT.shape))
        marks_BT = token_type_ids == 1
        advice = "Pass 1 at the predicate's first word and 0 elsewhere."
        _refuse(~marks_BT & (token_type_ids != 0), "`token_type_ids` has a value other than 0 and 1", advice)
        _refuse(marks_BT & ~words_BT, "`token_type_ids` marks a predicate where there is no word", advice)
        several_BT = marks_BT & (marks_BT.cumsum(1) > 1)
        _refuse(several_BT, "`token_type_ids` marks a second predicate", "Pass a row for each predicate.")
        return marks_BT.long()

    def _role_loss(
        self, logits: Tensor, labels: Tensor | None, marks_BT: Tensor, words_BT: Tensor, num_items: Tensor | int | None
    ) -> tuple[Tensor, Tensor | float]:
        """Mean cross-entropy of the known labels, and the share of these labels in all accumulated batches."""
        if labels is None:
            return 0 * logits.sum(), 1.0  # gradients of zeros: none is missing in distributed training
        labels = self._checked_labels(labels, words_BT)
        known_BT = labels != NO_LABEL
        _refuse(known_BT & ~words_BT, "`labels` has a label where there is no word", "Pass -100 there.")
        unmarked_BT = known_BT & ~marks_BT.any(1, keepdim=True)
        advice = "Pass `token_type_ids` with 1 at the predicate's first word, or -100 for all labels of the row."
        _refuse(unmarked_BT, "`labels` has a role, but the row marks no predicate", advice)
        count = known_BT.sum()
        items = torch.as_tensor(count if num_items is None else num_items, device=count.device)
        divisor = items.clamp(min=1)
        loss = F.nll_loss(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="sum")
        share = torch.where(items > 0, count / divisor, 1.0)
        return loss / divisor, share

    def _predicate_loss(self, predicate_BT: Tensor, labels: Tensor | None, words_BT: Tensor) -> Tensor:
        """Mean binary cross-entropy of the known labels."""
        if labels is None:
            return 0 * predicate_BT.sum()  # as in `_role_loss`
        check_ids("predicate_labels", labels, tuple(words_BT.shape))
        labels = labels.long()
        known_BT = labels != NO_LABEL
        outside_BT = known_BT & (labels != 0) & (labels != 1)
        advice = "Pass 1 at predicates, 0 at other words, and -100 where it is unknown."
        _refuse(outside_BT, "`predicate_labels` has a value other than 0, 1, -100", advice)
        _refuse(known_BT & ~words_BT, "`predicate_labels` has a label where there is no word", "Pass -100 there.")
        targets_N = labels[known_BT].to(predicate_BT.dtype)
        loss = F.binary_cross_entropy_with_logits(predicate_BT[known_BT], targets_N, reduction="sum")
        return loss / known_BT.sum().clamp(min=1)


def _refuse(wrong_BT: Tensor, problem: str, advice: str):
    """Raises an error that names the first wrong position, if there is one."""
    if wrong_BT.any():
        row, position = wrong_BT.nonzero()[0].tolist()
        raise ValueError(f"{problem}: row {row}, position {position}. {advice}")
