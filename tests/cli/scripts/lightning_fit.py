"""Lightning's Trainer on two processes, each with its half of the data."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    """A network of two layers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


lightning.seed_everything(0, verbose=False)
data = DataLoader(TensorDataset(torch.rand(16, 6)), batch_size=4)
quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, enable_checkpointing=False, **quiet
)
module = Module()
trainer.fit(module, data)
print(f"{module.global_rank} {sum(p.sum().item() for p in module.parameters()).hex()}\n", end="")
