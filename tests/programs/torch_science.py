"""Programs of PyTorch: probability, dynamics, graphs, geometry, agents."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.programs.registry import program
from tests.programs.torch_parts import grown, trained


@program("gpytorch", "linear-operator")
def gpytorch_regression() -> Any:
    """Gaussian processes: an exact one by conjugate gradients, a variational one, predictions."""
    import gpytorch
    from gpytorch import kernels, means, mlls, variational

    x = torch.linspace(0, 1, 20)
    y = torch.sin(6 * x) + 0.1 * torch.randn(20)

    class Exact(gpytorch.models.ExactGP):
        def __init__(self, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean, self.kernel = means.ConstantMean(), kernels.ScaleKernel(kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    class Variational(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            points, strategy = x[::4, None], variational.CholeskyVariationalDistribution(5)
            super().__init__(variational.VariationalStrategy(self, points, strategy))
            self.mean, self.kernel = means.ConstantMean(), kernels.MaternKernel()

        forward = Exact.forward

    results = []
    with gpytorch.settings.max_cholesky_size(1):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        model = Exact(likelihood)
        marginal = mlls.ExactMarginalLogLikelihood(likelihood, model)
        results.append(trained(model, lambda: -marginal(model(x), y)))
        model.eval()
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            found = likelihood(model(x + 0.01))
            results.append([found.mean, found.variance])
    approximate, likelihood = Variational(), gpytorch.likelihoods.GaussianLikelihood()
    bound = mlls.VariationalELBO(likelihood, approximate, 20)
    results.append(trained(approximate, lambda: -bound(approximate(x[:, None]), y)))
    return results


@program("botorch", "gpytorch")
def botorch_optimization() -> Any:
    """Bayesian optimization: a model is fitted by L-BFGS of SciPy, an acquisition maximized."""
    from botorch.acquisition import qLogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.optim import optimize_acqf
    from gpytorch.mlls import ExactMarginalLogLikelihood

    x = torch.rand(8, 2, dtype=torch.float64)
    y = -(x - 0.3).square().sum(-1, keepdim=True)
    for _ in range(2):
        model = SingleTaskGP(x, y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        acquisition = qLogExpectedImprovement(model, best_f=y.max())
        bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
        point, _ = optimize_acqf(
            acquisition, bounds, q=1, num_restarts=2, raw_samples=8, options={"maxiter": 10}
        )
        x, y = torch.cat([x, point]), torch.cat([y, -(point - 0.3).square().sum(-1, keepdim=True)])
    return x, y, dict(model.state_dict())


@program("pyro-ppl")
def pyro_inference() -> Any:
    """A Bayesian regression: variational inference with a guide, Hamiltonian Monte Carlo."""
    import pyro
    from pyro import distributions, infer

    pyro.clear_param_store()
    x = torch.randn(20, 3)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.1 * torch.randn(20)

    def model(x: torch.Tensor, y: torch.Tensor) -> None:
        weight = pyro.sample("weight", distributions.Normal(torch.zeros(3), 1.0).to_event(1))
        noise = pyro.sample("noise", distributions.HalfNormal(1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", distributions.Normal(x @ weight, noise + 0.01), obs=y)

    guide = infer.autoguide.AutoMultivariateNormal(model)
    svi = infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), infer.Trace_ELBO())
    losses = [svi.step(x, y) for _ in range(4)]
    chain = infer.MCMC(
        infer.NUTS(model, max_tree_depth=3), num_samples=3, warmup_steps=3, disable_progbar=True
    )
    chain.run(x, y)
    drawn = infer.Predictive(model, guide=guide, num_samples=2)(x, None)
    return losses, dict(pyro.get_param_store().items()), chain.get_samples(), drawn


@program("torchdiffeq")
def torchdiffeq_neural_ode() -> Any:
    """A neural differential equation: adaptive steps, gradients by the adjoint, an event."""
    from torchdiffeq import odeint, odeint_adjoint, odeint_event

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

        def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.net(y**3) + t

    field, start, times = Field(), torch.tensor([[2.0, 0.0]]), torch.linspace(0, 1, 6)
    target = torch.randn(6, 1, 2)
    results = [
        trained(field, lambda s=s: (s(field, start, times) - target).abs().mean(), steps=2)
        for s in (odeint, odeint_adjoint)
    ]
    crossing = lambda t, y: y[0, 0] - 2.2  # noqa: E731
    time, _ = odeint_event(field, start, times[0], event_fn=crossing, odeint_interface=odeint)
    return results, time.detach()


@program("torch-geometric")
def torch_geometric_attention() -> Any:
    """Graphs: attention and convolution over sampled edges, pooled, in batches, explained."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GATv2Conv, GCNConv, GraphNorm, global_mean_pool
    from torch_geometric.utils import dropout_edge

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm = GATv2Conv(6, 4, heads=2, dropout=0.1), GraphNorm(8)
            self.two, self.head = GCNConv(8, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor) -> Any:
            if self.training:
                edges, _ = dropout_edge(edges, 0.2)
            x = F.elu(self.norm(self.one(x, edges), batch))
            return self.head(global_mean_pool(self.two(x, edges).relu(), batch))

    graphs = [
        Data(x=torch.randn(7, 6), edge_index=torch.randint(0, 7, (2, 15)), y=torch.tensor(i % 3))
        for i in range(6)
    ]
    model, losses = Net(), []
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(2):
        for batch in DataLoader(graphs, batch_size=3, shuffle=True):
            loss = F.cross_entropy(model(batch.x, batch.edge_index, batch.batch), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return losses, grown(model)


@program("e3nn")
def e3nn_equivariant() -> Any:
    """Equivariant layers: tensor products of irreducible representations, by generated code."""
    from e3nn import nn as equivariant
    from e3nn import o3

    product = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "1x0e + 1x1o + 1x2e", "4x0e + 2x1o")
    gate = equivariant.Gate("2x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o")
    model = nn.ModuleDict({"product": product, "linear": o3.Linear("4x0e + 2x1o", gate.irreps_in)})
    x, points = torch.randn(5, 10), torch.randn(5, 3, requires_grad=True)

    def loss() -> torch.Tensor:
        edges = o3.spherical_harmonics("1x0e + 1x1o + 1x2e", points, normalize=True)
        energy = gate(model["linear"](product(x, edges))).square().sum()
        (force,) = torch.autograd.grad(energy, points, create_graph=True)
        return energy + force.square().sum()

    return trained(model, loss)


@program("torchrl", "tensordict")
def torchrl_ppo() -> Any:
    """Reinforcement learning: policy and value in TensorDicts, advantages, the PPO loss."""
    from tensordict import TensorDict
    from tensordict.nn import NormalParamExtractor, TensorDictModule
    from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4), NormalParamExtractor())
    module = TensorDictModule(network, ["observation"], ["loc", "scale"])
    actor = ProbabilisticActor(
        module, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True
    )
    critic = ValueOperator(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
    done = torch.zeros(2, 5, 1, dtype=torch.bool)
    after = {"observation": torch.randn(2, 5, 4), "reward": torch.randn(2, 5, 1), "done": done}
    after["terminated"] = done
    data = TensorDict({"observation": torch.randn(2, 5, 4), "next": after}, [2, 5])
    with torch.no_grad():
        actor(data)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    criterion = ClipPPOLoss(actor, critic)

    def loss() -> torch.Tensor:
        advantage(data)
        terms = criterion(data)
        return sum(value for key, value in terms.items() if key.startswith("loss_"))

    return trained(criterion, loss), dict(data.items())["advantage"]


@program("stable-baselines3", "gymnasium")
def stable_baselines_agents() -> Any:
    """PPO and soft actor-critic learn in an environment of our own; policies are evaluated."""
    import gymnasium
    import numpy as np
    from stable_baselines3 import PPO, SAC

    class Drift(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(-5, 5, (2,), np.float32)
        action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

        def reset(self, **options: Any) -> Any:
            super().reset(**options)
            self.at, self.time = self.np_random.normal(size=2).astype(np.float32), 0
            return self.at, {}

        def step(self, action: Any) -> Any:
            self.at, self.time = np.clip(self.at + 0.5 * action, -5, 5), self.time + 1
            return self.at, -float(np.square(self.at).sum()), False, self.time > 7, {}

    small = {"policy_kwargs": {"net_arch": [16]}, "seed": 0, "device": "cpu"}
    ppo = PPO("MlpPolicy", Drift(), n_steps=16, batch_size=8, n_epochs=2, **small)
    sac = SAC("MlpPolicy", Drift(), learning_starts=8, batch_size=8, buffer_size=64, **small)
    results = []
    for agent in ppo.learn(32), sac.learn(16):
        action, _ = agent.predict(np.ones(2, np.float32), deterministic=True)
        results += [action, grown(agent.policy)]
    return results
