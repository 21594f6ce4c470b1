"""Serves the vectors of a text's words: `MODEL=folder uvicorn server:app`. It needs torch, transformers and fastapi.

The folder has its code, as `save_pretrained` and `elmo push --output_dir` write it.
"""

import os
from typing import Annotated

import torch
from fastapi import Body, FastAPI, HTTPException
from transformers import AutoModel, AutoTokenizer

LONGEST = 5000  # characters of a text
folder = os.environ.get("MODEL", "model")
torch.set_num_threads(int(os.environ.get("THREADS", "1")))
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
app = FastAPI()


@app.get("/health")
def health() -> dict:
    return {"status": "ok"}


@app.post("/vectors")  # `def`, so that requests run in threads; `-> dict`, so that FastAPI writes the numbers fast
def vectors(text: Annotated[str, Body(embed=True)]) -> dict:
    if len(text) > LONGEST:
        raise HTTPException(413, f"The text has {len(text)} characters. Split it into texts of at most {LONGEST}.")
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        rows = model(**inputs).elmo_embeddings[0, 1:-1]  # without the markers
    words = [text[start:end] for start, end in inputs.encodings[0].offsets[1:-1]]
    return {"words": words, "vectors": rows.tolist()}
