"""The gradient of supervised fine-tuning is that of transformers' masked cross-entropy, however
the examples are cut and packed.
"""

import numpy as np
import pytest
import torch

from rl.algorithms.losses import CrossEntropyLoss
from rl.data.batches import batch_of
from rl.data.examples import Example
from rl.model.shards import Box
from rl.training.hugging_face_names import HuggingFaceNames
from tests.training.reference import relative_error
from tests.training.scenes import SIZES, cut_by, gradients_of
from tests.training.test_hugging_face import open_folder, transformers_model, write_folder

LENGTHS = (4, 15, 9, 7, 11, 2)
CUTS = {
    "one by one": {"micro_batch_size": 1},
    "by two": {"micro_batch_size": 2},
    "all at once": {"micro_batch_size": 6},
    "all at once, padded": {"micro_batch_size": 6, "packing": False},
    "16 tokens": {"micro_batch_tokens": 16},
    "40 tokens": {"micro_batch_tokens": 40},
    "40 tokens, padded": {"micro_batch_tokens": 40, "packing": False},
}
IGNORED = -100


def examples():
    """Return ragged examples, each with an answer or two that are trained."""
    draw = np.random.default_rng(0)
    made = []
    for line, length in enumerate(LENGTHS):
        trained = draw.random(length) < 0.5
        trained[0] = False
        trained[-1] = True
        tokens = draw.integers(SIZES["vocab_size"], size=length, dtype=np.int32)
        made.append(Example(tokens=tokens, trained=trained, line=line))
    return made


def transformers_gradient(folder):
    """Return the gradient of the mean over all trained tokens, one sequence at a time."""
    model = transformers_model(folder)
    count = sum(int(example.trained.sum()) for example in examples())
    for example in examples():
        tokens = torch.from_numpy(example.tokens).long()[None]
        labels = tokens.masked_fill(~torch.from_numpy(example.trained)[None], IGNORED)
        model(input_ids=tokens, labels=labels, num_items_in_batch=count).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def by_hugging_face_names(engine, gradients):
    """Return ``gradients`` as Hugging Face's tensors."""
    names = HuggingFaceNames(engine.model.config)
    found = {}
    for name, gradient in gradients.items():
        shape = tuple(gradient.shape)
        for piece in names.pieces(name, shape, Box.whole(shape)):
            whole = found.setdefault(piece.tensor, torch.zeros(piece.shape))
            part = piece.in_tensor.slices_in(Box.whole(piece.shape))
            whole[part] = gradient[piece.in_shard]
    return found


@pytest.fixture(scope="module", params=["tied", "untied"])
def both(request, tmp_path_factory):
    """An engine with a folder's weights, and transformers' gradient."""
    folder = tmp_path_factory.mktemp("both")
    source = write_folder(folder / "in", tied=request.param == "tied")
    engine, checkpointer = open_folder(source, folder)
    checkpointer.close()
    return engine, transformers_gradient(source)


@pytest.mark.parametrize("cut", CUTS)
def test_the_gradient_is_that_of_transformers_masked_cross_entropy(both, cut):
    engine, wanted = both
    cut_by(engine, **CUTS[cut])
    batch = batch_of(examples())
    engine.optimizers.zero_grad()
    engine.forward_backward(batch, CrossEntropyLoss.Config().build())
    count = float(batch.loss_weights.sum())
    gradients = {name: each / count for name, each in gradients_of(engine).items()}
    found = by_hugging_face_names(engine, gradients)
    assert set(found) - set(wanted) <= {"lm_head.weight"}  # tied to the embedding
    assert relative_error({name: found[name] for name in wanted}, wanted) <= 1e-6
