"""Three training steps of timm's ViT-S/16 with random weights."""

import timm
import torch

torch.manual_seed(0)
model = timm.create_model("vit_small_patch16_224", pretrained=False, num_classes=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    images, labels = torch.rand(4, 3, 224, 224), torch.arange(4)
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")
