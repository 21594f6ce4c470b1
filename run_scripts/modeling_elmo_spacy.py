"""The factory `elmo` and the architecture `modeling_elmo.ELMoTok2Vec.v1` of spaCy pipelines.

spaCy imports the factories of all installed packages whenever a pipeline is made. So they are outside the package
`modeling_elmo`, whose import takes seconds, and import it for a pipeline with ELMo.
"""

from typing import Any, Literal

from spacy.language import Language
from spacy.util import registry
from thinc.api import Model

ARCHITECTURE = "modeling_elmo.ELMoTok2Vec.v1"


@registry.architectures(ARCHITECTURE)
def make_tok2vec(
    name: str,
    width: int,
    scalar_mix_mode: Literal["learned", "average", "top"] | int = "learned",
    batch_tokens: int = 4096,
) -> Model:
    """A frozen biLM with a mix that learns, for `elmo`, `tok2vec`, or a component with a `tok2vec` of its own.

    The biLM is loaded with the first text, or by `nlp.initialize()`. A saved pipeline contains it.

    Args:
        name: folder or Hub name of any ELMo model.
        width: its `hidden_size`.
        scalar_mix_mode: `"learned"`, or with fixed weights `"average"`, `"top"`, or a number (0 is the token layer).
        batch_tokens: as for `elmo embed`.
    """
    from modeling_elmo.run_scripts.vectors import spacy_pipe

    return spacy_pipe.wrap_encoder(spacy_pipe.DocumentEncoder(name, width, scalar_mix_mode, batch_tokens))


@Language.factory("elmo", assigns=["doc.tensor"], default_config={"model": {"@architectures": ARCHITECTURE}})
def make_elmo(nlp: Language, name: str, model: Model) -> Any:
    """An `ELMoPipe`: the component `tok2vec`, with vectors and similarities."""
    from modeling_elmo.run_scripts.vectors.spacy_pipe import ELMoPipe

    return ELMoPipe(nlp.vocab, model, name)
