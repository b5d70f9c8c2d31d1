"""Programs of PyTorch: packages that train, and what happens around training."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.programs.registry import program
from tests.programs.torch_parts import digits, grown, trained


def _network() -> nn.Module:
    """A small convolutional network for the digits."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(288, 10),
    )


def _loader(count: int = 48, shuffle: bool = True) -> Any:
    return DataLoader(TensorDataset(*digits(count)), batch_size=16, shuffle=shuffle)


@program("lightning", "torchmetrics")
def lightning_trainer() -> Any:
    """The Trainer: two epochs with validation, clipping, a schedule, averaged weights, metrics."""
    import lightning
    from lightning.pytorch.callbacks import StochasticWeightAveraging
    from torchmetrics.classification import MulticlassAccuracy

    class Digits(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.accuracy = _network(), MulticlassAccuracy(10)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.accuracy(self.network(batch[0]), batch[1])
            self.log("accuracy", self.accuracy)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), 1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    module = Digits()
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        callbacks=[StochasticWeightAveraging(1e-3, swa_epoch_start=1)],
        **quiet,
    )
    trainer.fit(module, _loader(), _loader(16, False))
    return grown(module), dict(trainer.callback_metrics)


@program("accelerate")
def accelerate_loop() -> Any:
    """Accelerate: gradients accumulated over two batches, clipping, its data loader."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader())
    losses = []
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()))
    return losses, grown(accelerator.unwrap_model(model))


@program("opacus")
def opacus_private() -> Any:
    """Differentially private training: gradients of each sample by hooks, clipped, with noise."""
    from opacus import PrivacyEngine

    results = []
    for mode in "hooks", "ew", "ghost":
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=_loader(32),
            criterion=nn.CrossEntropyLoss(),
            grad_sample_mode=mode,
            **options,
        )
        private, optimizer, *criterion, loader = made
        for images, labels in loader:
            optimizer.zero_grad()
            loss = (criterion or [F.cross_entropy])[0](private(images), labels)
            loss.backward()
            optimizer.step()
            results.append(loss.item())
        results.append(grown(model))
    return results


@program("backpack-for-pytorch")
def backpack_curvature() -> Any:
    """Gradients of each sample, their variance and the curvature's diagonal, by module hooks."""
    from backpack import backpack, extend, extensions

    images, labels = digits(16)
    model = extend(nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Sigmoid(), nn.Linear(12, 10)))
    criterion = extend(nn.CrossEntropyLoss())
    wanted = extensions.BatchGrad(), extensions.Variance(), extensions.DiagGGNExact()
    with backpack(*wanted, extensions.KFAC()):
        criterion(model(images), labels).backward()
    return [
        [p.grad, p.grad_batch, p.variance, p.diag_ggn_exact, p.kfac] for p in model.parameters()
    ]


@program("captum")
def captum_attributions() -> Any:
    """Attributions: integrated gradients, DeepLift by hooks, GradCAM, Shapley values, occlusion."""
    from captum import attr

    images, labels = digits(4)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)
    ).eval()
    options = {"target": labels}
    return [
        attr.IntegratedGradients(model).attribute(images, n_steps=8, **options),
        attr.DeepLift(model).attribute(images, **options),
        attr.LayerGradCam(model, model[0]).attribute(images, **options),
        attr.GuidedBackprop(model).attribute(images, **options),
        attr.Occlusion(model).attribute(images, (1, 4, 4), strides=(1, 2, 2), **options),
        attr.ShapleyValueSampling(model).attribute(
            images, n_samples=2, feature_mask=torch.arange(64).reshape(1, 1, 8, 8) // 16, **options
        ),
        attr.NoiseTunnel(attr.Saliency(model)).attribute(images, nt_samples=3, **options),
    ]


# -- several processes ---------------------------------------------------------------


@contextlib.contextmanager
def _group() -> Iterator[None]:
    """The process group of the ranks, by gloo; of this process alone, if it is the only one."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        store = os.environ.get("AMANDA_PROGRAMS_STORE", folder)
        _group.runs = getattr(_group, "runs", 0) + 1  # type: ignore[attr-defined]
        path = f"file://{store}/store-{_group.runs}"  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", path, rank=rank, world_size=size)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def _shard() -> tuple[torch.Tensor, torch.Tensor]:
    """The digits of this rank."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    images, labels = digits()
    return images[rank::size], labels[rank::size]


@program("torch", ranks=2)
def distributed_data_parallel() -> Any:
    """DistributedDataParallel: two ranks by gloo, buckets, accumulation without reduction."""
    from torch.nn.parallel import DistributedDataParallel

    with _group():
        images, labels = _shard()
        model = DistributedDataParallel(_network(), bucket_cap_mb=0.01)

        def loss() -> torch.Tensor:
            with model.no_sync():
                F.cross_entropy(model(images[::2]), labels[::2]).backward()
            return F.cross_entropy(model(images[1::2]), labels[1::2])

        return trained(model, loss)


@program("torch", ranks=2)
def fully_sharded() -> Any:
    """FSDP2: parameters sharded over two ranks as DTensors, gathered by hooks, mixed precision."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with _group():
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        images, labels = _shard()
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in model[1], model[3], model:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        losses, state, _ = trained(model, lambda: F.cross_entropy(model(images).float(), labels))
        local = {
            f"{kind}.{name}": t.to_local() if hasattr(t, "to_local") else t
            for kind, tensors in state.items()
            for name, t in tensors.items()
        }
        return losses, local


# -- PyTorch alone ---------------------------------------------------------------------


@program("torch")
def recurrent_network() -> Any:
    """An LSTM on packed sequences, CTC loss, forward and backward hooks, weight normalization."""
    from torch.nn.utils import parametrizations, rnn

    lstm = nn.LSTM(8, 12, 2, batch_first=True, bidirectional=True, dropout=0.2)
    head = parametrizations.weight_norm(nn.Linear(24, 6))
    lengths, x = torch.tensor([9, 7, 4]), torch.randn(3, 9, 8)
    targets, model = torch.randint(1, 6, (3, 3)), nn.ModuleDict({"lstm": lstm, "head": head})
    seen: list[torch.Tensor] = []
    head.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    head.register_full_backward_hook(lambda module, grads, outs: seen.append(outs[0].clone()))

    def loss() -> torch.Tensor:
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True)
        y, _ = rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)
        likelihood = head(y).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(likelihood, targets, lengths, torch.full((3,), 3))

    return trained(model, loss), seen
