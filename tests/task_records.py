"""Records of trained heads, as `elmo ner` and the other tasks write them."""


def record(
    arm: str, seed: int, validation: float, test: float, weights=(0.2, 0.5, 0.3), metric="f1", **changes
) -> dict:
    return {
        "task": "ner",
        "arm": arm,
        "seed": seed,
        "metric": metric,
        "metrics": {
            "test": {metric: test, "per_type": {"PER": {"f1": test, "number": 7}}, "confusion": [[1]]},
            "validation": {metric: validation, "per_type": {}, "confusion": [[2]]},
        },
        "layer_weights": {"input": list(weights)} if weights else {},
        "train_samples": 3394,
        "epochs": 7.0,
        "seconds": 81.2,
        "settings": {"learning_rate": 0.001},
        **changes,
    }


RECORDS = [
    record("baseline", 1, 0.40, 0.30, weights=None),
    record("elmo", 1, 0.50, 0.42, weights=(0.2, 0.5, 0.3)),
    record("baseline", 2, 0.42, 0.34, weights=None),
    record("elmo", 2, 0.54, 0.48, weights=(0.4, 0.4, 0.2)),
    record("elmo", 3, 0.55, 0.48, weights=(0.3, 0.3, 0.4)),
]
