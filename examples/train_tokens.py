"""Train a small language model on tokens that all ranks and DataLoader workers read from one copy in shared memory.

    shmserve start --data corpus.bin --detach
    torchrun --nproc_per_node 2 examples/train_tokens.py --dataset corpus

or, without starting a daemon first:

    torchrun --nproc_per_node 2 examples/train_tokens.py --data corpus.bin

It uses the GPUs where there are any, else the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from shmserve_client import DistributedSampler, ShmDataset


class Block(nn.Module):
    """One layer of a transformer: causal attention, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attention = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class LanguageModel(nn.Module):
    """Predicts each next token from those before it in the window."""

    def __init__(self, vocab_size: int, block_size: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def open_dataset(args: argparse.Namespace) -> ShmDataset:
    # A window of block_size + 1 tokens gives the inputs, and the targets one token further on. uint16 tokens come as
    # int64, which an embedding and a loss can use.
    windows = {"block_size": args.block_size + 1, "stride": args.block_size}
    if args.data:
        return ShmDataset.from_path(*args.data, **windows)
    return ShmDataset(args.dataset, **windows)


def endless(loader: DataLoader, sampler: DistributedSampler) -> Iterator[torch.Tensor]:
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--dataset", help="the name of a dataset that a daemon serves")
    source.add_argument("--data", nargs="+", help="files to serve without a daemon of one's own")
    parser.add_argument("--vocab-size", type=int, default=65_536)
    parser.add_argument("--block-size", type=int, default=128, help="tokens that the model sees at once")
    parser.add_argument("--batch-size", type=int, default=16, help="windows per rank and step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2, help="DataLoader workers per rank")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)

    dataset = open_dataset(args)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True, pin_memory=on_gpu
    )
    if len(loader) == 0:
        raise SystemExit(f"error: {len(dataset)} windows are less than a batch for each rank: lower --batch-size")
    model = DistributedDataParallel(LanguageModel(args.vocab_size, args.block_size).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step, batch in zip(range(1, args.steps + 1), endless(loader, sampler), strict=False):
        batch = batch.to(device, non_blocking=True)
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (1, args.steps) or step % 20 == 0:
            dist.all_reduce(mean := loss.detach().clone())
            if dist.get_rank() == 0:
                print(f"step {step}  loss {mean.item() / dist.get_world_size():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
