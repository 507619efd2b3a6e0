"""Two ranks over gloo: merged norms equal those of one process, on every rank; and no rank waits for another to measure."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from tests.fsdp2_here import WITHOUT, there
from tests.probes.kit import Lab
from tests.probes.test_activations import Stack
from tests.probes.test_gradients import layer

WORLD = 2


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def data() -> Tensor:
    return torch.randn(2 * WORLD, 8, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return 10 * model(x).square().mean()


def one_step(
    net: nn.Module, x: Tensor, *, clip: bool = True, sites: Any = ("2",)
) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """Own values, values merged over ranks, and the series that are this rank's part only."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    lab = Lab(net, optimizer, sites=sites if sites == "none" else list(sites))
    loss_of(net, x).backward()
    if clip:
        lab.instruments.clip_grad_norm_(0.5)
    optimizer.step()
    slot = lab.instruments.close(0)
    assert slot is not None
    return merged_over_ranks(lab, lab.instruments.read(slot))


def merged_over_ranks(lab: Lab, reading: Any) -> tuple[dict[str, float], dict[str, float], list[str]]:
    ranks = [reading.numbers]
    if dist.is_initialized():
        gathered = [torch.empty(len(reading.numbers), dtype=torch.float64) for _ in range(WORLD)]
        dist.all_gather(gathered, torch.from_numpy(reading.numbers))
        ranks = [numbers.numpy() for numbers in gathered]
    return present(lab, reading), present(lab, reading.merged(ranks)), sorted(lab.instruments.local_series)


def present(lab: Lab, reading: Any) -> dict[str, float]:
    values, here = reading.values()
    return {name: v for name, v, p in zip(lab.instruments.series, values.tolist(), here, strict=True) if p}


def mine(x: Tensor) -> Tensor:
    return x.chunk(WORLD)[dist.get_rank()]


def ddp() -> Any:
    return one_step(nn.parallel.DistributedDataParallel(model()), mine(data()))


def fsdp() -> Any:
    from torch.distributed.fsdp import fully_shard

    net = model()
    for part in (net[0], net[2]):
        fully_shard(part)
    return one_step(fully_shard(net), mine(data()))


def hybrid() -> Any:
    """Replicated over both ranks, as the outer dimension of HSDP on a mesh of (2, 1)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    return one_step(fully_shard(model(), mesh=mesh), mine(data()))


def tensor_parallel() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (WORLD,))
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return one_step(net, data(), clip=False)


def stack_alone() -> tuple[nn.Module, list[Tensor]]:
    micro = [torch.randint(0, 16, (2 * WORLD, 5), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    return Stack(), micro


def stack() -> Any:
    """What people really run: FSDP2 over checkpointed blocks, each compiled, bf16 autocast, gradient accumulation."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    net, micro = stack_alone()
    for number, block in enumerate(net.blocks):
        net.blocks[number] = checkpoint_wrapper(block)
        net.blocks[number].compile(backend="aot_eager")
        fully_shard(net.blocks[number])
    return accumulate(fully_shard(net), [mine(x) for x in micro])


def accumulate(net: nn.Module, micro: list[Tensor]) -> Any:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    lab = Lab(net, optimizer)
    for step in range(2):
        for x in micro:
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(x).square().mean()
            loss.backward()
        lab.instruments.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        slot = lab.instruments.close(step)
        assert slot is not None
        reading = lab.instruments.read(slot)
    return merged_over_ranks(lab, reading)


def experts() -> Any:
    """Each rank has its own expert under one name, and nothing says so."""
    net = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(math.sqrt((20, 100)[dist.get_rank()] / 4))
    return one_step(net, torch.ones(1, 4), clip=False, sites="none")


def told_experts() -> Any:
    """The same experts as shards of one tensor, as expert parallelism with DTensor has them, beside what DDP would average."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    size = math.sqrt((20, 100)[dist.get_rank()] / 4)
    net = nn.Module()
    net.weight = nn.Parameter(DTensor.from_local(torch.full((1, 4), size), mesh, [Shard(0)]))
    net.weight.grad = DTensor.from_local(torch.full((1, 4), size), mesh, [Shard(0)])
    lab = Lab(net, optimizer := torch.optim.SGD(net.parameters(), lr=0.0), sites="none")
    optimizer.step()
    slot = lab.instruments.close(0)
    assert slot is not None
    return merged_over_ranks(lab, lab.instruments.read(slot))


def ddp_with_a_local_part() -> Any:
    """DDP is told to leave one parameter alone: no replica, whatever the wrapper."""
    net = model()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.bias"])
    return one_step(nn.parallel.DistributedDataParallel(net), mine(data()), clip=False)


def alone() -> Any:
    """Only one rank is watched; its statistics wait for nobody."""
    net = nn.parallel.DistributedDataParallel(model())
    if dist.get_rank() == 1:
        loss_of(net, mine(data())).backward()
        return None
    lab = Lab(net, optimizer := torch.optim.SGD(net.parameters(), lr=0.1))
    loss_of(net, mine(data())).backward()
    optimizer.step()
    return lab.close()


CASES: list[Callable[[], Any]] = [
    ddp, fsdp, hybrid, tensor_parallel, stack, experts, told_experts, ddp_with_a_local_part, alone,
]  # fmt: skip


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    results = {case.__name__: case() for case in CASES if case.__name__ not in WITHOUT}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@functools.cache
def results(folder: str) -> list[dict[str, Any]]:
    mp.spawn(work, args=(folder,), nprocs=WORLD)
    return [torch.load(f"{folder}/{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results(str(tmp_path_factory.mktemp("ranks")))


@pytest.fixture(scope="module")
def single() -> dict[str, float]:
    net = model()
    lab = Lab(net, optimizer := torch.optim.AdamW(net.parameters(), lr=0.01), sites=["2"])
    loss_of(net, data()).backward()
    lab.instruments.clip_grad_norm_(0.5)
    optimizer.step()
    return lab.close()


def numbers(found: dict[str, float]) -> dict[str, float]:
    apart = ("perf/", "optim/applied", "optim/skipped", "param/replicas_differ")
    bits = ("/channel_kurtosis", "/checksum")  # other on each rank, or on the last bit
    return {k: v for k, v in found.items() if not k.startswith(apart) and not k.endswith(bits)}


@pytest.mark.parametrize("case", ["ddp", "fsdp", "hybrid"])
@pytest.mark.parametrize("rank", range(WORLD))
def test_merged_values_are_those_of_one_process(
    case: str, rank: int, ranks: list[dict[str, Any]], single: dict[str, float]
) -> None:
    _, merged, _ = ranks[rank][there(case)]
    assert numbers(merged) == pytest.approx(numbers(single), rel=2e-5, abs=1e-7)


@pytest.mark.parametrize("rank", range(WORLD))
def test_tensor_parallel_shards(rank: int, ranks: list[dict[str, Any]]) -> None:
    net = model()
    lab = Lab(net, optimizer := torch.optim.AdamW(net.parameters(), lr=0.01), sites=["2"])
    loss_of(net, data()).backward()
    optimizer.step()
    true = lab.close()
    _, merged, _ = ranks[rank]["tensor_parallel"]
    wanted = {name: v for name, v in numbers(true).items() if name.startswith(("layer/", "grad/", "param/", "optim/exp"))}
    assert {name: v for name, v in merged.items() if name in wanted} == pytest.approx(wanted, rel=2e-5, abs=1e-7)


@pytest.mark.parametrize("rank", range(WORLD))
def test_the_stack_people_really_run(rank: int, ranks: list[dict[str, Any]]) -> None:
    net, micro = stack_alone()
    _, true, _ = accumulate(net, micro)
    _, merged, local = ranks[rank][there("stack")]
    assert {name for name in true if name.startswith("act/")} == {name for name in merged if name.startswith("act/")}
    assert layer(merged).keys() == layer(true).keys()
    assert {name for name in true if name.startswith("embedding/")} <= set(local)
    assert numbers(merged) == pytest.approx(numbers(true), rel=0.05, abs=2e-3)


def test_data_parallel_ranks_know_the_whole_without_merging(ranks: list[dict[str, Any]], single: dict[str, float]) -> None:
    for own, _, local in (rank["ddp"] for rank in ranks):
        assert not local
        assert layer(own) == pytest.approx(layer(single), rel=2e-5)


@pytest.mark.parametrize("case", ["ddp", "stack"])
def test_a_kurtosis_over_channels_is_the_mean_of_the_ranks(case: str, ranks: list[dict[str, Any]]) -> None:
    own = [{k: v for k, v in rank[there(case)][0].items() if k.endswith("/channel_kurtosis")} for rank in ranks]
    assert own[0] and own[0].keys() == own[1].keys() and own[0] != own[1]
    mean = {name: (own[0][name] + own[1][name]) / 2 for name in own[0]}
    for rank in ranks:
        assert {k: v for k, v in rank[case][1].items() if k in mean} == pytest.approx(mean)


def test_shards_are_said_to_be_shards(ranks: list[dict[str, Any]], single: dict[str, float]) -> None:
    parts = [rank[there("fsdp")] for rank in ranks]
    for own, _, local in parts:
        assert {"grad/norm", "param/norm", "layer/0.weight/grad_norm"} <= set(local)
        assert layer(own)["0.weight"] < 0.99 * layer(single)["0.weight"]
    assert layer(parts[0][0])["0.weight"] != layer(parts[1][0])["0.weight"]


def test_an_unknown_layout_is_local_and_in_no_total(ranks: list[dict[str, Any]]) -> None:
    for own, merged, local in (rank["experts"] for rank in ranks):
        assert "layer/weight/grad_norm" in own and "layer/weight/weight_norm" in own
        assert {"layer/weight/grad_norm", "grad/norm", "param/norm"} <= set(local)
        assert not layer(merged) and not {"grad/norm", "param/norm", "grad/norm_clipped"} & merged.keys()


def test_experts_that_say_they_are_shards_are_summed(ranks: list[dict[str, Any]]) -> None:
    """Megatron-LM#5916 (F7): 10.954, not the replicas' 7.236."""
    for rank, (own, merged, local) in enumerate(each["told_experts"] for each in ranks):
        for name in ("layer/weight/grad_norm", "grad/norm", "layer/weight/weight_norm", "param/norm"):
            assert own[name] == pytest.approx(math.sqrt((20, 100)[rank])) and name in local
            assert merged[name] == pytest.approx(math.sqrt(120))


def test_what_data_parallelism_leaves_alone_is_local(ranks: list[dict[str, Any]]) -> None:
    for _, merged, local in (rank["ddp_with_a_local_part"] for rank in ranks):
        assert {"layer/2.bias/grad_norm", "grad/norm"} <= set(local) and "layer/0.weight/grad_norm" not in local
        assert set(layer(merged)) == {"0.weight", "0.bias", "2.weight"} and "grad/norm" not in merged


def test_one_watched_rank_does_not_hang(ranks: list[dict[str, Any]]) -> None:
    assert len(layer(ranks[0]["alone"])) == 4
