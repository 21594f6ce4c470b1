"""Tags of words as a pipeline: the stock `token-classification`, for tokens that are words."""

from typing import Any

from transformers import TokenClassificationPipeline


class ELMoTokenClassificationPipeline(TokenClassificationPipeline):
    """The stock pipeline `token-classification` for tokens that are words, with scores that are plain numbers.

    JSON has no numbers of numpy. A token of another length than its text (`...` for an ellipsis) would count as a piece
    of a word.

    Models that are not ELMo get the stock pipeline itself.
    """

    def __new__(cls, *args: Any, model: Any = None, **options: Any) -> Any:
        if model is None or model.config.model_type == "elmo":  # without a model: a copy
            return super().__new__(cls)
        return TokenClassificationPipeline(*args, model=model, **options)

    def gather_pre_entities(self, *args: Any, **options: Any) -> list[dict[str, Any]]:
        words = super().gather_pre_entities(*args, **options)
        return [{**word, "is_subword": False} for word in words]

    def postprocess(self, *args: Any, **options: Any) -> list[dict[str, Any]]:
        entities = super().postprocess(*args, **options)
        return [{**entity, "score": float(entity["score"])} for entity in entities]
