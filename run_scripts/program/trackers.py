"""Trackers, which show the figures of a run while it trains: TensorBoard, Weights & Biases, Trackio and others."""

import shlex
from collections.abc import Sequence
from pathlib import Path

TENSORBOARD_FOLDER = "runs"  # in the folder of a run
OF_TRAINER = "huggingface"  # under this name, other trackers collect the runs of Trainer


def where_to_look(trackers: Sequence[str], folder: Path, project: str = OF_TRAINER) -> str:
    """The sentence with which a run begins.

    Args:
        folder: of TensorBoard's files.
        project: the name under which the other trackers collect runs.
    """
    places = {
        "tensorboard": f"tensorboard --logdir {shlex.quote(str(folder))}",
        "trackio": f"trackio show --project {project}",
        "wandb": f"the page that wandb names below, in the project {project}",
    }
    if not trackers:
        return "No tracker shows the figures of this run. To see them while it trains, pass --report_to tensorboard."
    return f"Figures of this run: {'; '.join(places.get(name, name) for name in trackers)}"
