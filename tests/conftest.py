import atexit
import os
import shutil
import tempfile

import pytest
import torch
from hypothesis import settings

# No network, and no files cached by another run or another worker. Set before huggingface_hub is imported, which
# reads these variables once.
_HOME = tempfile.mkdtemp(prefix="modeling_elmo_tests_")
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
os.environ.update(HF_HOME=_HOME, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.pop("HF_MODULES_CACHE", None)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # its kernels run on the CPU
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny, and pytest-xdist fills the cores

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


def pytest_configure(config):
    for mark in ("accelerate_tests", "flash_attn_test", "flash_attn_3_test", "flash_attn_4_test", "torch_compile_test"):
        config.addinivalue_line("markers", f"{mark}: used by transformers' own tests in test_common_modeling.py")


@pytest.fixture
def onednn_at_any_size(monkeypatch):
    """Matrix products of tiny models take the path of large ones, on every processor."""

    from modeling_elmo.kernels import products  # after the environment above is set

    monkeypatch.setattr(products, "FEW_PRODUCTS", 0)
    monkeypatch.setattr(products, "_is_intel", False)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def warnings_of_transformers(caplog):
    """Its loggers, and ours, also write to `caplog`; `warning_once` forgets what it said."""
    from transformers.utils import logging  # after the environment above is set

    logging.warning_once.cache_clear()
    logging.enable_propagation()
    yield caplog
    logging.disable_propagation()
    logging.warning_once.cache_clear()


@pytest.fixture
def check_streams():
    """A function of a pipeline and rows: whether all that transformers' pipelines read row by row has these results."""
    from torch.utils.data import Dataset, IterableDataset, Subset
    from transformers.pipelines.pt_utils import KeyDataset  # after the environment above is set

    class Rows(Dataset):
        def __init__(self, rows):
            self.rows, self.read = rows, []

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            self.read.append(self.rows[index])
            return self.rows[index]

    class Stream(Rows, IterableDataset):
        __len__ = None

        def __iter__(self):
            return map(self.__getitem__, range(len(self.rows)))

    def streams(rows):
        found = [(each, each.read) for each in (Rows(rows), Stream(rows))]
        for kind in (iter, lambda rows: (row for row in rows), lambda rows: Subset(rows, range(len(rows)))):
            source = Rows(rows)
            found.append((kind(source), source.read))
        source = Rows([{"row": row} for row in rows])
        return [*found, (KeyDataset(source, "row"), source.read)]

    def check(pipe, rows, expected, **options):
        for given, read in streams(rows):
            found = iter(pipe(given, **options))
            first = next(found)  # `iter` of the rest would begin anew
            assert len(read) < len(rows)
            assert [first, *(next(found) for _ in rows[1:])] == expected

    return check
