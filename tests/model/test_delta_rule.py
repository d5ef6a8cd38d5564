"""The delta rule in chunks is the recurrence, in whatever parts sequences come."""

import pytest
import torch
import torch.nn.functional as F

from rl.model.delta_rule import Heads, States, delta_net, delta_net_of_documents

HEADS = Heads(key_dim=6, value_dim=5, values=2)
GROUPS, KERNEL = 2, 4
LENGTHS = (20, 130, 1, 3, 64, 65)
POSITIONS = torch.cat([*map(torch.arange, LENGTHS)])


def inputs(lengths=LENGTHS, dtype=torch.float64) -> tuple[torch.Tensor, ...]:
    """Return rows, decay, beta and weight of a gated delta net."""
    draw = torch.Generator().manual_seed(0)
    tokens, rows = sum(lengths), GROUPS * HEADS.rows

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=dtype)

    heads = (tokens, GROUPS * HEADS.values)
    decay = -F.softplus(normal(*heads))
    return normal(tokens, rows), decay, normal(*heads).sigmoid(), normal(rows, 1, KERNEL)


def step_by_step(rows, decay, beta, weight):
    """Return the outputs for one sequence by the recurrence, as its paper writes it."""
    padded = F.pad(rows.T, (KERNEL - 1, 0))
    mixed = F.silu(F.conv1d(padded, weight, groups=len(weight))).T
    q, k, v = HEADS.split(mixed)
    q, k = (each.repeat_interleave(HEADS.values, 1) for each in (q, k))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    state = rows.new_zeros(v.shape[1], HEADS.key_dim, HEADS.value_dim)
    outputs = []
    for t in range(len(rows)):
        state = state * decay[t].exp()[:, None, None]
        change = beta[t][:, None] * (v[t] - torch.einsum("nk,nkv->nv", k[t], state))
        state = state + torch.einsum("nk,nv->nkv", k[t], change)
        outputs.append(torch.einsum("nk,nkv->nv", q[t], state) * HEADS.key_dim**-0.5)
    return torch.stack(outputs)


def test_sequences_are_computed_as_by_the_recurrence():
    *tokens, weight = inputs()
    out, _ = delta_net(*tokens, weight, HEADS, LENGTHS)
    parts = zip(*(each.split(LENGTHS) for each in tokens), strict=True)
    wanted = torch.cat([step_by_step(*part, weight) for part in parts])
    assert (out - wanted).abs().max() <= 1e-12


@pytest.mark.parametrize("part", [1, 2, 37, 64])
def test_parts_of_sequences_continue_from_the_states_of_those_before(part):
    lengths = tuple(part * count for count in (3, 1, 2))
    *tokens, weight = inputs(lengths)
    wanted, last = delta_net(*tokens, weight, HEADS, lengths)
    sequences = [*zip(*(each.split(lengths) for each in tokens), strict=True)]
    states, found = None, [[] for _ in lengths]
    for number in range(3):
        running = [s for s, length in enumerate(lengths) if number * part < length]
        here = slice(number * part, (number + 1) * part)
        rows = [torch.cat([sequences[s][n][here] for s in running]) for n in range(3)]
        before = states and States(*(each[running] for each in states))
        out, after = delta_net(*rows, weight, HEADS, (part,) * len(running), before)
        for own, new in zip(states or (), after if states else (), strict=True):
            own[running] = new
        states = states or after
        for s, own in zip(running, out.split(part), strict=True):
            found[s].append(own)
    assert (torch.cat([*map(torch.cat, found)]) - wanted).abs().max() <= 1e-12
    for own, whole in zip(states, last, strict=True):
        assert (own - whole).abs().max() <= 1e-12


def test_the_operator_has_the_gradients_of_its_function_and_keeps_its_inputs_alone():
    tensors = [each.requires_grad_() for each in inputs(dtype=torch.float32)]
    plain = delta_net(*tensors, HEADS, LENGTHS)[0]
    weights = torch.randn_like(plain)
    wanted = torch.autograd.grad((plain * weights).sum(), tensors)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, id):
        delta_net_of_documents(*tensors, HEADS, POSITIONS)
    assert [each.data_ptr() for each in kept] == [t.data_ptr() for t in (*tensors, POSITIONS)]
    compiled = torch.compile(delta_net_of_documents, backend="aot_eager", fullgraph=True)
    for call in (delta_net_of_documents, compiled):
        out = call(*tensors, HEADS, POSITIONS)
        assert torch.equal(out, plain)
        assert all(map(torch.equal, torch.autograd.grad((out * weights).sum(), tensors), wanted))
