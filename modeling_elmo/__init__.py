"""ELMo (Peters et al. 2018) for Hugging Face transformers. `import modeling_elmo` registers it with the Auto classes.

| to | import from `modeling_elmo` |
|---|---|
| compute the vectors of a batch | `ELMoConfig`, `ELMoModel`, `ELMoTokenizer` |
| embed many sentences | `embed_sentences`; `Embedder` with datasets or Ray, `ELMoVectorizer` with scikit-learn |
| put the mix of layers into a network of your own | `ScalarMix` |
| train a language model | `ELMoForPreTraining` |
| score or predict words | `score_texts`, `predict_texts`, which return a `WordScore` or `Prediction` for each token |
| measure surprisal in other libraries | `ELMoForCausalLM` |
| tag words | `ELMoForTokenClassification` |
| classify texts or pairs of texts | `ELMoForSequenceClassification` |
| answer questions | `ELMoForQuestionAnswering`, `ELMoQuestionAnsweringPipeline` |
| label semantic roles | `ELMoForSemanticRoleLabeling`, `ELMoSemanticRolePipeline` |
| resolve coreference | `ELMoForCoreferenceResolution`, `ELMoCoreferencePipeline` |
| convert a published checkpoint | `convert_checkpoint`, and a format, such as `modeling_elmo.conversion.original` |
| compute in 8 bits, or by the plain definition | `ELMoInt8Config`, `elmo_backend` |

Models return an `ELMoModelOutput`, `ELMoForPreTrainingOutput`, `ELMoTokenClassifierOutput`, `ELMoSemanticRoleOutput` or
`ELMoCoreferenceOutput`, and their methods `ELMoScores` and `ELMoPredictions`. Every model is an `ELMoPreTrainedModel`.
The programs of the command `elmo` import the same names.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from transformers.pipelines import PIPELINE_REGISTRY

# In a clone, the code folders are at the top of the repository; an installed package has them below this folder.
_root = Path(__file__).resolve().parents[1]
if (_root / "tokenization" / "tokenization_elmo.py").is_file():
    __path__.append(str(_root))

from .base import ELMoPreTrainedModel
from .causal import ELMoForCausalLM
from .configuration_elmo import AUTO_CLASS_NAMES, ELMoConfig
from .heads.classifier import ELMoForSequenceClassification
from .heads.coreference_pipeline import ELMoCoreferencePipeline
from .heads.coreference_resolver import ELMoCoreferenceOutput, ELMoForCoreferenceResolution
from .heads.reader import ELMoForQuestionAnswering
from .heads.reader_pipeline import ELMoQuestionAnsweringPipeline
from .heads.role_labeler import ELMoForSemanticRoleLabeling, ELMoSemanticRoleOutput
from .heads.role_labeler_pipeline import ELMoSemanticRolePipeline
from .heads.tagger import ELMoForTokenClassification, ELMoTokenClassifierOutput
from .kernels.int8 import ELMoInt8Config
from .kernels.plan import elmo_backend
from .model_outputs import ELMoForPreTrainingOutput, ELMoModelOutput
from .modeling_elmo import ELMoForPreTraining, ELMoModel, ScalarMix
from .scoring import ELMoPredictions, ELMoScores
from .tokenization.tokenization_elmo import ELMoTokenizer

__version__ = "1.0.0"

transformers.AutoConfig.register(ELMoConfig.model_type, ELMoConfig, exist_ok=True)
transformers.AutoTokenizer.register(ELMoConfig, fast_tokenizer_class=ELMoTokenizer, exist_ok=True)
for _auto_class, _names in AUTO_CLASS_NAMES.items():
    if _auto_class != "AutoConfig":
        _model_classes = tuple(globals()[name] for name in _names)
        getattr(transformers, _auto_class).register(ELMoConfig, _model_classes, exist_ok=True)
for _task, _pipeline_class, _auto_class in (  # transformers refuses "question-answering", a task that it removed
    ("extractive-question-answering", ELMoQuestionAnsweringPipeline, transformers.AutoModelForQuestionAnswering),
    ("semantic-role-labeling", ELMoSemanticRolePipeline, transformers.AutoModelForTokenClassification),
    ("coreference-resolution", ELMoCoreferencePipeline, transformers.AutoModelForTokenClassification),
):
    PIPELINE_REGISTRY.register_pipeline(_task, pipeline_class=_pipeline_class, pt_model=_auto_class, type="text")
    del _pipeline_class._registered_impl  # else it would be saved with files of the package, beside the model's code

# Imported when they are used, because their modules import more than models need.
_LAZY = {
    "ELMoVectorizer": "run_scripts.vectors.vectorizer",
    "Embedder": "run_scripts.vectors.embedder",
    "Prediction": "prediction",
    "WordScore": "prediction",
    "convert_checkpoint": "conversion.formats",
    "embed_sentences": "run_scripts.vectors.embedding",
    "predict_texts": "prediction",
    "score_texts": "prediction",
}
# Modules in which the public names were before, and in which programs still look for them.
_FORMER_MODULES = """
    elmo_backends elmo_operators elmo_scoring modeling_elmo_causal modeling_elmo_coreference modeling_elmo_heads
    modeling_elmo_roles pipeline_elmo pipeline_elmo_coreference pipeline_elmo_roles prediction_elmo
"""
for _module in _FORMER_MODULES.split():
    sys.modules[f"{__name__}.{_module}"] = sys.modules[__name__]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "ELMoConfig",
    "ELMoCoreferenceOutput",
    "ELMoCoreferencePipeline",
    "ELMoForCausalLM",
    "ELMoForCoreferenceResolution",
    "ELMoForPreTraining",
    "ELMoForPreTrainingOutput",
    "ELMoForQuestionAnswering",
    "ELMoForSemanticRoleLabeling",
    "ELMoForSequenceClassification",
    "ELMoForTokenClassification",
    "ELMoInt8Config",
    "ELMoModel",
    "ELMoModelOutput",
    "ELMoPredictions",
    "ELMoPreTrainedModel",
    "ELMoQuestionAnsweringPipeline",
    "ELMoScores",
    "ELMoSemanticRoleOutput",
    "ELMoSemanticRolePipeline",
    "ELMoTokenClassifierOutput",
    "ELMoTokenizer",
    "ScalarMix",
    "elmo_backend",
]
