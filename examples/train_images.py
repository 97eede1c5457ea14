"""Train a small CNN on images whose bytes all workers read from one copy in shared memory, and decode themselves.

    python examples/train_images.py photos/    # photos/cat/1.jpg, photos/dog/2.jpg, ...

It uses the GPU where there is one, else the CPU.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

from shmserve_client import DistributedSampler, ShmDataset
from shmserve_client.images import DecodeImage


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a directory of images for each class")
    parser.add_argument("--size", type=int, default=64, help="pixels of a side")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=4)
    return parser.parse_args()


def network(classes: int) -> nn.Module:
    def stage(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]

    features = [*stage(3, 16), *stage(16, 32), *stage(32, 64)]
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dataset = ShmDataset.from_path(args.folder, columns=["image", "label"], transform=DecodeImage(args.size))
    classes = int(dataset.column("label").max()) + 1
    model = network(classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, num_workers=args.workers, persistent_workers=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for batch in loader:
            images = batch["image"].to(device, non_blocking=True).float() / 255
            loss = nn.functional.cross_entropy(model(images), batch["label"].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(images)
        print(f"epoch {epoch}  loss {total / len(dataset):.3f}")


if __name__ == "__main__":
    main()
