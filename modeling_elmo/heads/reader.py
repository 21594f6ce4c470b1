"""Answers to questions (section 4): BiDAF with self-attention (Clark and Gardner 2017), or a linear layer.

Shape suffixes: B rows; N real tokens of the batch; M packed tokens of contexts or questions; S texts, one of each row;
R texts of a group, L their longest; D width of the words that a biRNN reads; H width of its output; E width of an
encoded word; J width of joined vectors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import QuestionAnsweringModelOutput

from ..configuration_elmo import ELMoConfig
from ..inputs import NO_LABEL, check_ids, pad, word_mask
from ..kernels.products import fast_linear
from .packed_texts import PackedTexts, Places, masked_softmax, with_elmo
from .recurrence import TaskGRU, VariationalDropout, glorot_
from .task_model import ELMoTaskModel, is_second, reads_batch

FIRST_PRODUCT = 0.25  # equal words attract each other from the start; random signs take epochs to do so


class TrilinearAttention(nn.Module):
    """`a_ij = w_1 . x_i + w_2 . y_j + w_3 . (x_i * y_j)` (Seo et al. 2017, equation 1)."""

    def __init__(self, size: int):
        super().__init__()
        self.own = nn.Linear(size, 1, bias=False)
        self.other = nn.Linear(size, 1, bias=False)
        self.product = nn.Parameter(torch.empty(size))

    def forward(self, x_RLE: Tensor, y_RLE: Tensor) -> Tensor:
        """Scores `(texts, length of x, length of y)`."""
        products_RLL = (x_RLE * self.product) @ y_RLE.transpose(1, 2)
        return self.own(x_RLE) + self.other(y_RLE).transpose(1, 2) + products_RLL


class SpanReader(nn.Module):
    """Scores each word of the context as the first and as the last word of the answer.

        h = biGRU(context), q = biGRU(question), the same                                             contextual GRU
        c_i = sum_j softmax_j(a_ij) q_j;  q_c = sum_i softmax_i(max_j a_ij) h_i                       bi-attention
        x_i = relu(W [h_i; c_i; h_i * c_i; q_c * c_i] + b)
        s = biGRU(x);  s_i' = sum_j softmax_j(a'_ij, i != j) s_j                                      self-attention
        z_i = x_i + relu(W' [s_i; s_i'; s_i * s_i'] + b')
        start = w_s . biGRU(z);  end = w_e . biGRU([biGRU(z); z])                                     prediction
        none = w_0 . relu(W_0 [start states; end states; z] + b_0)                                    no answer

    (sections 2 and 4 of Clark and Gardner 2017). The score of no answer reads the three vectors pooled over the
    context: the first two with the softmax of the starts and of the ends, the third with a softmax of its own.

    Args:
        hidden_size: width of each direction of the biGRUs. The linear layers have twice this width (supplement A.3 of
            the ELMo paper: 90 and 180).
        dropout: rate of variational dropout on the inputs of biGRUs and attentions. The words are dropped out before.
        output_elmo_size: width of the ELMo vectors that are concatenated to the encoded words. 0: none.
    """

    def __init__(self, input_size: int, hidden_size: int, dropout: float, output_elmo_size: int = 0):
        super().__init__()
        width = 2 * hidden_size
        encoded = width + output_elmo_size
        self.output_elmo_size = output_elmo_size
        self.dropout = VariationalDropout(dropout)
        self.encoder = TaskGRU(input_size, hidden_size)
        self.attention = TrilinearAttention(encoded)
        self.attended = nn.Linear(4 * encoded, width)
        self.self_encoder = TaskGRU(width, hidden_size)
        self.self_attention = TrilinearAttention(width)
        self.self_attended = nn.Linear(3 * width, width)
        self.start_encoder = TaskGRU(width, hidden_size)
        self.start = nn.Linear(width, 1)
        self.end_encoder = TaskGRU(2 * width, hidden_size)
        self.end = nn.Linear(width, 1)
        self.pooling = nn.Linear(width, 1, bias=False)
        self.none_hidden = nn.Linear(3 * width, hidden_size)
        self.none = nn.Linear(hidden_size, 1)

    def forward(
        self, inputs_ND: Tensor, questions: PackedTexts, contexts: PackedTexts, elmo_NE: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of starts and ends `(packed tokens of the contexts,)`, and of no answer `(batch,)`.

        Args:
            inputs_ND: `(tokens, input_size)`.
            questions, contexts: the words of each, a text in each row.
            elmo_NE: `(tokens, output_elmo_size)`.
        """
        question_ME = self._encoded(inputs_ND, questions, elmo_NE)
        context_ME = self._encoded(inputs_ND, contexts, elmo_NE)
        read_MH = self._attend(context_ME, contexts, question_ME, questions)
        read_MH = read_MH + self._attend_to_itself(read_MH, contexts)
        start_MH = self.start_encoder(self.dropout(read_MH, contexts.text_N), contexts)
        joined_MJ = torch.cat([start_MH, read_MH], -1)
        end_MH = self.end_encoder(self.dropout(joined_MJ, contexts.text_N), contexts)
        start_M1 = self.start(start_MH)
        end_M1 = self.end(end_MH)
        pooled = [
            contexts.sum(contexts.softmax(start_M1) * start_MH),
            contexts.sum(contexts.softmax(end_M1) * end_MH),
            contexts.sum(contexts.softmax(self.pooling(read_MH)) * read_MH),
        ]
        hidden_BH = self.none_hidden(torch.cat(pooled, -1)).relu()
        none_B1 = self.none(hidden_BH)
        return start_M1.squeeze(-1), end_M1.squeeze(-1), none_B1.squeeze(-1)

    def _encoded(self, words_ND: Tensor, texts: PackedTexts, elmo_NE: Tensor | None) -> Tensor:
        encoded_MH = self.encoder(texts.pack(words_ND), texts)
        return with_elmo(self.dropout(encoded_MH, texts.text_N), texts, elmo_NE)

    def _attend(self, context_ME: Tensor, contexts: PackedTexts, question_ME: Tensor, questions: PackedTexts) -> Tensor:
        def attention(context: Places, question: Places) -> Tensor:
            question_RLE = question.read(question_ME)
            is_word_R1L = question.mask_RL[:, None]
            scores_RLL = self.attention(context.read(context_ME), question_RLE)
            attended_RLE = masked_softmax(scores_RLL, is_word_R1L, -1) @ question_RLE
            lowest = torch.finfo(scores_RLL.dtype).min
            highest_RL1 = scores_RLL.masked_fill(~is_word_R1L, lowest).amax(-1, keepdim=True)
            return torch.cat([attended_RLE, highest_RL1], -1)

        both_MJ = contexts.attend(questions, attention)
        attended_ME, highest_M1 = both_MJ.split([context_ME.shape[1], 1], -1)
        summary_SE = contexts.sum(contexts.softmax(highest_M1) * context_ME)
        summary_ME = summary_SE.index_select(0, contexts.text_N)
        joined = [context_ME, attended_ME, context_ME * attended_ME, summary_ME * attended_ME]
        return fast_linear(self.attended, torch.cat(joined, -1)).relu()

    def _attend_to_itself(self, read_MH: Tensor, contexts: PackedTexts) -> Tensor:
        states_MH = self.self_encoder(self.dropout(read_MH, contexts.text_N), contexts)
        states_MH = self.dropout(states_MH, contexts.text_N)

        def attention(context: Places, _: Places) -> Tensor:
            states_RLH = context.read(states_MH)
            is_itself_LL = torch.eye(context.mask_RL.shape[1], device=read_MH.device).bool()
            is_other_RLL = context.mask_RL[:, None] & ~is_itself_LL
            scores_RLL = self.self_attention(states_RLH, states_RLH)
            return masked_softmax(scores_RLL, is_other_RLL, -1) @ states_RLH

        attended_MH = contexts.attend(contexts, attention)
        joined_MJ = torch.cat([states_MH, attended_MH, states_MH * attended_MH], -1)
        return fast_linear(self.self_attended, joined_MJ).relu()

    def initialize_parameters(self):
        """Glorot-uniform linear layers, biases 0, products of attentions at 0.25. The biGRUs initialize themselves."""
        glorot_(self)
        for module in self.modules():
            if isinstance(module, TrilinearAttention):
                init.constant_(module.product, FIRST_PRODUCT)


class ELMoForQuestionAnswering(ELMoTaskModel):
    """Finds the answer to a question in a context: BiDAF with self-attention (Clark and Gardner 2017), or a linear
    layer.

    A row is `tokenizer(question, context)`, which the biLM reads as two texts. The logits cover the whole row. Answers
    are words of the context; the row's first token means "no answer here". All other logits are very low.
    """

    network = "reader"
    default_elmo_placement = "both"
    custom_pipelines = {
        "question-answering": {
            "impl": "modeling_elmo.ELMoQuestionAnsweringPipeline",
            "pt": ["AutoModelForQuestionAnswering"],
        }
    }

    def __init__(self, config: ELMoConfig):
        super().__init__(config)
        if self.is_linear:
            self.qa_outputs = nn.Linear(self.input_size, 2)
        else:
            self.reader = SpanReader(self.input_size, self.task_hidden_size, self.task_dropout, self.output_elmo_size)
        self.post_init()

    @reads_batch
    def forward(
        self,
        character_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        elmo_hidden_states: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> QuestionAnsweringModelOutput:
        """Computes logits of starts and ends `(batch, time)`, and the mean of their losses if both positions are given.

        Args:
            character_ids, input_ids, attention_mask, inputs_embeds: as in `ELMoModel`. `input_ids` show the markers.
            token_type_ids: `(batch, time)`, 0 at the question and 1 at the context.
            elmo_hidden_states, output_hidden_states: as in `ELMoForTokenClassification`.
            start_positions, end_positions: `(batch,)`, position of the answer's first and last token in the row. Both
                are the row's first token if this context has no answer, and -100 if the row does not count.
        """
        inputs = self.read(character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds, elmo_hidden_states)
        if token_type_ids is None:
            raise ValueError(
                "A row has a question and a context: pass the `token_type_ids` of tokenizer(question, context)."
            )
        words_BT = word_mask(self.config, inputs.mask_BT, input_ids, inputs_embeds)
        second_BT = is_second(token_type_ids, inputs.mask_BT)
        context_BT = words_BT & second_BT
        first_BT = inputs.mask_BT & (inputs.mask_BT.cumsum(1) == 1)
        if self.is_linear:
            both_N2 = self.qa_outputs(inputs.tokens_ND)
            start_BT, end_BT = pad(both_N2, inputs.mask_BT).unbind(-1)
        else:
            questions = PackedTexts(words_BT & ~second_BT, inputs.mask_BT)
            contexts = PackedTexts(context_BT, inputs.mask_BT)
            start_M, end_M, none_B = self.reader(inputs.tokens_ND, questions, contexts, inputs.output_NE)
            both_M2 = torch.stack([start_M, end_M], -1)
            both_BT2 = pad(contexts.unpack(both_M2, len(inputs.tokens_ND)), inputs.mask_BT)
            is_none_BT1 = first_BT[..., None]
            start_BT, end_BT = torch.where(is_none_BT1, none_B[:, None, None], both_BT2).unbind(-1)
        allowed_BT = context_BT | first_BT
        lowest = torch.finfo(start_BT.dtype).min / 4  # the sum of a start and an end stays finite
        start_BT = start_BT.masked_fill(~allowed_BT, lowest)
        end_BT = end_BT.masked_fill(~allowed_BT, lowest)
        loss = None
        if start_positions is not None or end_positions is not None:
            if start_positions is None or end_positions is None:
                raise ValueError("Pass `start_positions` and `end_positions` together.")
            start_loss = self._loss("start_positions", start_BT, start_positions, allowed_BT)
            end_loss = self._loss("end_positions", end_BT, end_positions, allowed_BT)
            loss = (start_loss + end_loss) / 2 + self.penalty()
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_BT,
            end_logits=end_BT,
            hidden_states=self._requested(inputs, output_hidden_states),
        )

    def _loss(self, name: str, logits_BT: Tensor, position_B: Tensor, allowed_BT: Tensor) -> Tensor:
        """Mean cross-entropy of the rows that count."""
        check_ids(name, position_B, (len(allowed_BT),))
        position_B = position_B.long()
        is_inside_B = (position_B >= 0) & (position_B < allowed_BT.shape[1])
        inside_B1 = (position_B * is_inside_B)[:, None]
        is_allowed_B = is_inside_B & allowed_BT.gather(1, inside_B1).squeeze(1)
        counts_B = position_B != NO_LABEL
        is_wrong_B = counts_B & ~is_allowed_B
        if is_wrong_B.any():
            row = int(is_wrong_B.nonzero()[0])
            raise ValueError(
                f"`{name}` is {int(position_B[row])} in row {row}, which is not a word of the context. Pass the "
                "position of a word, or of the row's first token if there is no answer."
            )
        loss = F.cross_entropy(logits_BT, position_B, reduction="sum")
        return loss / counts_B.sum().clamp(min=1)
