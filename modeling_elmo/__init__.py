"""ELMo (Peters et al. 2018) for Hugging Face transformers."""

from pathlib import Path

import transformers
from transformers.pipelines import PIPELINE_REGISTRY

# In a clone, the code folders are at the top of the repository; an installed package has them below this folder.
_root = Path(__file__).resolve().parents[1]
if (_root / "tokenization" / "tokenization_elmo.py").is_file():
    __path__.append(str(_root))

from .configuration_elmo import AUTO_CLASS_NAMES, ELMoConfig  # noqa: E402 (uses the path above)
from .elmo_backends import elmo_backend  # noqa: E402
from .elmo_operators import ELMoInt8Config  # noqa: E402
from .elmo_scoring import ELMoPredictions, ELMoScores  # noqa: E402
from .modeling_elmo import (  # noqa: E402
    ELMoForPreTraining,
    ELMoForPreTrainingOutput,
    ELMoModel,
    ELMoModelOutput,
    ELMoPreTrainedModel,
    ScalarMix,
)
from .modeling_elmo_causal import ELMoForCausalLM  # noqa: E402
from .modeling_elmo_coreference import ELMoCoreferenceOutput, ELMoForCoreferenceResolution  # noqa: E402
from .modeling_elmo_heads import (  # noqa: E402
    ELMoForQuestionAnswering,
    ELMoForSequenceClassification,
    ELMoForTokenClassification,
    ELMoTokenClassifierOutput,
)
from .modeling_elmo_roles import ELMoForSemanticRoleLabeling, ELMoSemanticRoleOutput  # noqa: E402
from .pipeline_elmo import ELMoQuestionAnsweringPipeline, ELMoTokenClassificationPipeline  # noqa: E402
from .pipeline_elmo_coreference import ELMoCoreferencePipeline  # noqa: E402
from .pipeline_elmo_roles import ELMoSemanticRolePipeline  # noqa: E402
from .tokenization.tokenization_elmo import ELMoTokenizer  # noqa: E402

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
# Not registered: every pipeline of this task that is saved would then include our code.
PIPELINE_REGISTRY.supported_tasks["token-classification"]["impl"] = ELMoTokenClassificationPipeline

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
    "ELMoTokenClassificationPipeline",
    "ELMoTokenClassifierOutput",
    "ELMoTokenizer",
    "ScalarMix",
    "elmo_backend",
]
