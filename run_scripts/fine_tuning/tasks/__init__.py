"""The tasks of the paper, and their data and scores. `TASKS` has them by the names of the `elmo` command."""

from modeling_elmo.run_scripts.fine_tuning.task import Task
from modeling_elmo.run_scripts.fine_tuning.tasks.classification import Classification
from modeling_elmo.run_scripts.fine_tuning.tasks.coreference import Coreference
from modeling_elmo.run_scripts.fine_tuning.tasks.question_answering import QuestionAnswering
from modeling_elmo.run_scripts.fine_tuning.tasks.semantic_roles import SemanticRoles
from modeling_elmo.run_scripts.fine_tuning.tasks.tagging import Tagging

TASKS: dict[str, type[Task]] = {
    "ner": Tagging,
    "classify": Classification,
    "qa": QuestionAnswering,
    "srl": SemanticRoles,
    "coref": Coreference,
}
