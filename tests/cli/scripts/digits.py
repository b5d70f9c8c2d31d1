"""scikit-learn's digits, a small network and a loop of plain PyTorch."""

import argparse
import json
import os
import pickle
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn


class History(list):
    """Losses; pickled, it refers to the main module."""


def train(model, images, labels, epochs):
    history, optimizer = History(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(300):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
        history.append(loss.item())
        print("trained", flush=True)
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-t", "--tool", default="none")
    parser.add_argument("-o", "--output", default="model.pickle")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    settings = json.loads(Path("settings.json").read_text())
    torch.manual_seed(settings["seed"])
    os.makedirs("work", exist_ok=True)
    os.chdir("work")
    images, labels = load_digits(return_X_y=True)
    images, _, labels, _ = train_test_split(images / 16, labels, random_state=0)
    images, labels = torch.tensor(images, dtype=torch.float32), torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    history = train(model, images, labels, options.epochs)
    Path(options.output).write_bytes(pickle.dumps((history, model)))
    restored, model = pickle.loads(Path(options.output).read_bytes())
    print(options.tool, type(restored).__name__, [loss.hex() for loss in restored])
    print(torch.rand(1).item().hex())
    # A mistake: there are ten digits.
    nn.Embedding(2, 4)(labels)
