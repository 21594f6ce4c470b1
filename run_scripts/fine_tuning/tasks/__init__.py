"""The tasks of the paper, and their data and scores."""

from importlib import import_module

from ..task import Task

# By the names that the `elmo` command has for them. A program imports only the files of its task.
TASKS = {
    "ner": "tagging.Tagging",
    "classify": "classification.Classification",
    "qa": "question_answering.QuestionAnswering",
    "srl": "semantic_roles.SemanticRoles",
    "coref": "coreference.Coreference",
}


def task_class(name: str) -> type[Task]:
    file, class_name = TASKS[name].split(".")
    return getattr(import_module(f"{__name__}.{file}"), class_name)
