"""The tasks by the names that the `elmo` command has for them."""

from modeling_elmo.run_scripts.fine_tuning.classification import Classification
from modeling_elmo.run_scripts.fine_tuning.coreference import Coreference
from modeling_elmo.run_scripts.fine_tuning.question_answering import QuestionAnswering
from modeling_elmo.run_scripts.fine_tuning.semantic_roles import SemanticRoles
from modeling_elmo.run_scripts.fine_tuning.tagging import Tagging
from modeling_elmo.run_scripts.fine_tuning.task import Task

TASKS: dict[str, type[Task]] = {
    "ner": Tagging,
    "classify": Classification,
    "qa": QuestionAnswering,
    "srl": SemanticRoles,
    "coref": Coreference,
}
