"""The factory `elmo` of spaCy pipelines.

spaCy imports the factories of all installed packages whenever a pipeline is made. So this one is outside the package
`modeling_elmo`, whose import takes seconds, and imports it for a pipeline with ELMo.
"""

from typing import Any, Literal

from spacy.language import Language


@Language.factory(
    "elmo",
    assigns=["doc.tensor"],
    default_config={"layer": "top", "batch_tokens": 4096, "device": None, "trust_remote_code": False},
)
def make_elmo(
    nlp: Language,
    name: str,
    model: str,
    layer: Literal["top", "average", "mixed"] | int,
    batch_tokens: int,
    device: str | None,
    trust_remote_code: bool,
) -> Any:
    """An `ELMoPipe`, which loads the model when it reads its first text."""
    from modeling_elmo.run_scripts.vectors.spacy_pipe import ELMoPipe

    return ELMoPipe(name, model, str(layer), batch_tokens, device, trust_remote_code)
