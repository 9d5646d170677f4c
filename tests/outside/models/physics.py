"""Physics and scientific computing: plain torch, torchdiffeq, and operators of neuraloperator."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from neuralop.models import FNO, TFNO
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torchdiffeq import odeint

from .entry import Entry, Inputs, image


def _mlp(*widths: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class Burgers(nn.Module):
    """A physics-informed network: the residual of Burgers' equation by forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.u = _mlp(2, 16, 16, 1)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        def u(t: Tensor, x: Tensor) -> Tensor:
            return self.u(torch.cat([t, x], 1))

        def u_x(x: Tensor) -> Tensor:
            return jvp(lambda y: u(t, y), (x,), (torch.ones_like(x),))[1]

        first, second = jvp(u_x, (x,), (torch.ones_like(x),))
        u_t = jvp(lambda s: u(s, x), (t,), (torch.ones_like(t),))[1]
        return u_t + u(t, x) * first - 0.01 * second


class Poisson(nn.Module):
    """A physics-informed network with derivatives by `torch.autograd.grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.u = _mlp(2, 16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = self.u(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        parts = [torch.autograd.grad(first[:, i].sum(), x, create_graph=True)[0] for i in (0, 1)]
        return parts[0][:, 0] + parts[1][:, 1] + torch.sin(x).prod(1)


class Hamiltonian(nn.Module):
    """A Hamiltonian network: a vector field from the gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = _mlp(4, 16, 1)

    def forward(self, state: Tensor) -> Tensor:
        slope = vmap(grad(lambda s: self.energy(s).squeeze()))(state)
        position, momentum = slope.chunk(2, 1)
        return torch.cat([momentum, -position], 1)


class Lagrangian(nn.Module):
    """A Lagrangian network: accelerations from a Hessian and a linear solve."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp(4, 16, 1, act=nn.Softplus)

    def _lagrangian(self, q: Tensor, v: Tensor) -> Tensor:
        return self.net(torch.cat([q, v])).squeeze() + 0.5 * v.dot(v)

    def _acceleration(self, q: Tensor, v: Tensor) -> Tensor:
        mass = hessian(self._lagrangian, 1)(q, v)
        mixed = jacrev(grad(self._lagrangian, 1), 0)(q, v)
        force = grad(self._lagrangian, 0)(q, v)
        return torch.linalg.solve(mass + 2 * torch.eye(2, dtype=q.dtype), force - mixed @ v)

    def forward(self, q: Tensor, v: Tensor) -> Tensor:
        return vmap(self._acceleration)(q, v)


class NeuralOde(nn.Module):
    """A neural ODE, solved by a Runge-Kutta method of torchdiffeq."""

    def __init__(self, method: str = "rk4") -> None:
        super().__init__()
        self.field, self.method = _mlp(3, 16, 2), method
        self.register_buffer("times", torch.linspace(0, 1, 4))

    def forward(self, state: Tensor) -> Tensor:
        def field(t: Tensor, x: Tensor) -> Tensor:
            return self.field(torch.cat([x, t.expand(x.shape[0], 1)], 1))

        return odeint(field, state, self.times, method=self.method)


class SpectralLayer(nn.Module):
    """A convolution in Fourier space, with complex weights."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, 2) / width)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        low = torch.einsum(
            "bim,iom->bom", spectrum[..., : self.modes], torch.view_as_complex(self.weight)
        )
        rest = spectrum.shape[-1] - self.modes
        return torch.fft.irfft(F.pad(low, (0, rest)), n=x.shape[-1])


class Fourier1d(nn.Module):
    """A Fourier neural operator on a line, plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.last = nn.Conv1d(1, 8, 1), nn.Conv1d(8, 1, 1)
        self.spectral = nn.ModuleList(SpectralLayer(8, 5) for _ in range(2))
        self.local = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.last(x)


class DeepONet(nn.Module):
    """A branch for functions, a trunk for places, their product."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = _mlp(12, 16, 8), _mlp(2, 16, 8)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, functions: Tensor, places: Tensor) -> Tensor:
        return torch.einsum("bk,pk->bp", self.branch(functions), self.trunk(places)) + self.bias


class Egnn(nn.Module):
    """Equivariant messages: features and places of points, all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.edge, self.node = _mlp(17, 16, 8, act=nn.SiLU), _mlp(16, 16, 8, act=nn.SiLU)
        self.move = nn.Linear(8, 1)

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        apart = places[:, :, None] - places[:, None]
        square = apart.square().sum(-1, keepdim=True)
        count = x.shape[1]
        pairs = [x[:, :, None].expand(-1, -1, count, -1), x[:, None].expand(-1, count, -1, -1)]
        messages = self.edge(torch.cat([*pairs, square], -1))
        moved = places + (apart / (square + 1).sqrt() * self.move(messages)).mean(2)
        return x + self.node(torch.cat([x, messages.sum(2)], -1)), moved


class Simulator(nn.Module):
    """A graph network simulator: encode, exchange messages, decode accelerations."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = _mlp(4, 16, 8, act=nn.ReLU), _mlp(8, 16, 2, act=nn.ReLU)
        self.edges = nn.ModuleList(_mlp(19, 16, 8, act=nn.ReLU) for _ in range(2))
        self.nodes = nn.ModuleList(_mlp(16, 16, 8, act=nn.ReLU) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))

    def forward(self, x: Tensor, places: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        apart = places[source] - places[target]
        geometry = torch.cat([apart, apart.norm(dim=1, keepdim=True)], 1)
        h = self.encode(x)
        for edge, node, norm in zip(self.edges, self.nodes, self.norms, strict=True):
            messages = edge(torch.cat([h[source], h[target], geometry], 1))
            summed = torch.zeros_like(h).index_add(0, target, messages)
            h = norm(h + node(torch.cat([h, summed], 1)))
        return self.decode(h)


class Energy(nn.Module):
    """A potential of atom pairs with Gaussian features; energy and forces."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp(8, 16, 1, act=nn.SiLU)
        self.register_buffer("centers", torch.linspace(0, 3, 8))

    def _energy(self, places: Tensor) -> Tensor:
        i, j = torch.triu_indices(places.shape[0], places.shape[0], 1)
        distance = (places[i] - places[j]).norm(dim=1, keepdim=True)
        return self.net(torch.exp(-4 * (distance - self.centers).square())).sum()

    def forward(self, places: Tensor) -> tuple[Tensor, Tensor]:
        energies = vmap(self._energy)(places)
        return energies, -vmap(grad(self._energy))(places)


class Siren(nn.Module):
    """Sines as activations, over random Fourier features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, 8) * 2)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)])

    def forward(self, places: Tensor) -> Tensor:
        phase = places @ self.frequencies
        x = torch.cat([phase.sin(), phase.cos()], -1)
        for layer in self.layers[:-1]:
            x = torch.sin(5 * layer(x))
        return self.layers[-1](x)


class Kan(nn.Module):
    """A Kolmogorov-Arnold layer: B-splines by the recursion of Cox and de Boor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2.2, 2.2, 12))
        self.base, self.splines = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 4, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        grid, places = self.grid, x[..., None]
        basis = ((places >= grid[:-1]) & (places < grid[1:])).to(x.dtype)
        for k in range(1, 4):
            left = (places - grid[: -k - 1]) / (grid[k:-1] - grid[: -k - 1])
            right = (grid[k + 1 :] - places) / (grid[k + 1 :] - grid[1:-k])
            basis = left * basis[..., :-1] + right * basis[..., 1:]
        return self.base(F.silu(x)) + torch.einsum("bik,oik->bo", basis, self.splines)


class Flow(nn.Module):
    """RealNVP: coupling layers and their log determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(_mlp(2, 16, 4) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_det = torch.zeros(x.shape[0], dtype=x.dtype)
        for net in self.nets:
            fixed, moved = x.chunk(2, 1)
            scale, shift = net(fixed).chunk(2, 1)
            x = torch.cat([moved * scale.tanh().exp() + shift, fixed], 1)
            log_det = log_det + scale.tanh().sum(1)
        return x, log_det


class ConvLstm(nn.Module):
    """A convolutional LSTM over a film."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.last = nn.Conv2d(9, 32, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, film: Tensor) -> Tensor:
        batch, length, _, height, width = film.shape
        h = c = film.new_zeros(batch, 8, height, width)
        for step in range(length):
            i, f, o, g = self.gates(torch.cat([film[:, step], h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.last(h)


class Waves(nn.Module):
    """The wave equation with a learned speed, leapfrog steps on a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.speed = nn.Parameter(torch.rand(16, 16) * 0.3)

    def forward(self, u: Tensor) -> Tensor:
        before = u
        for _ in range(6):
            near = sum(u.roll(s, d) for s in (1, -1) for d in (-1, -2))
            before, u = u, 2 * u - before + self.speed.square() * (near - 4 * u)
        return u


class Lattice(nn.Module):
    """Lattice Boltzmann, D2Q9, with a learned relaxation time."""

    def __init__(self) -> None:
        super().__init__()
        steps = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]
        self.steps = steps
        self.register_buffer("directions", torch.tensor(steps, dtype=torch.float32))
        self.register_buffer("weights", torch.tensor([4 / 9] + [1 / 9] * 4 + [1 / 36] * 4))
        self.omega = nn.Parameter(torch.tensor(1.2))

    def forward(self, f: Tensor) -> Tensor:
        for _ in range(3):
            density = f.sum(1, keepdim=True)
            speed = torch.einsum("bqhw,qd->bdhw", f, self.directions) / density
            along = torch.einsum("bdhw,qd->bqhw", speed, self.directions)
            square = speed.square().sum(1, keepdim=True)
            shape = 1 + 3 * along + 4.5 * along.square() - 1.5 * square
            f = f + self.omega * (density * self.weights[:, None, None] * shape - f)
            moved = [f[:, q].roll(step, (1, 2)) for q, step in enumerate(self.steps)]
            f = torch.stack(moved, 1)
        return f


class SpectralPoisson(nn.Module):
    """A Poisson solver in Fourier space behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        source = self.conv(x)
        k = torch.fft.fftfreq(x.shape[-1], dtype=x.dtype) * 6.2831853
        square = k[:, None].square() + k[None, :].square() + 1e-2
        return torch.fft.ifft2(torch.fft.fft2(source) / square).real


class Ensemble(nn.Module):
    """Four perceptrons with stacked weights, one `vmap` over them."""

    def __init__(self) -> None:
        super().__init__()
        self.skeleton = _mlp(3, 8, 1).to("meta")
        self.names = [name for name, _ in self.skeleton.named_parameters()]
        stacked = [torch.randn(4, *p.shape) * 0.4 for p in self.skeleton.parameters()]
        self.members = nn.ParameterList(stacked)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def one(*parameters: Tensor) -> Tensor:
            return functional_call(
                self.skeleton, dict(zip(self.names, parameters, strict=True)), (x,)
            )

        results = vmap(one)(*self.members)
        return results.mean(0), results.var(0)


class GaussianProcess(nn.Module):
    """A Gaussian process: marginal likelihood and mean by a Cholesky factor."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale, self.log_noise = (nn.Parameter(torch.tensor(v)) for v in (0.1, -2.0))

    def forward(self, x: Tensor, y: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        def kernel(a: Tensor, b: Tensor) -> Tensor:
            square = (a[:, None] - b[None]).square().sum(-1)
            return torch.exp(-0.5 * square / self.log_scale.exp())

        noise = self.log_noise.exp() * torch.eye(x.shape[0], dtype=x.dtype)
        factor = torch.linalg.cholesky(kernel(x, x) + noise)
        alpha = torch.cholesky_solve(y[:, None], factor)[:, 0]
        likelihood = -0.5 * y.dot(alpha) - factor.diagonal().log().sum()
        return likelihood, kernel(new, x) @ alpha


def _points(n: int) -> Inputs:
    return torch.randn(2 + n, 5 + n, 8), torch.randn(2 + n, 5 + n, 3)


def _particles(n: int) -> Inputs:
    nodes, count = 8 + 3 * n, 20 + 7 * n
    source = torch.randint(0, nodes, (count,))
    edges = torch.stack([source, (source + torch.randint(1, nodes, (count,))) % nodes])
    return torch.randn(nodes, 4), torch.randn(nodes, 2), edges


def _observed(n: int) -> Inputs:
    x = torch.randn(6 + n, 2)
    return x, x.sin().sum(1), torch.randn(4 + n, 2)


_OPERATOR = {
    "n_modes": (4, 4),
    "in_channels": 1,
    "out_channels": 1,
    "hidden_channels": 8,
    "n_layers": 2,
}

MODELS = {
    "burgers": Entry(Burgers, lambda n: (torch.rand(6 + n, 1), torch.rand(6 + n, 1))),
    "poisson": Entry(Poisson, lambda n: (torch.rand(6 + n, 2),), needs_grad=True),
    "hamiltonian": Entry(Hamiltonian, lambda n: (torch.randn(5 + n, 4),)),
    "lagrangian": Entry(Lagrangian, lambda n: (torch.randn(5 + n, 2), torch.randn(5 + n, 2))),
    "neural_ode_rk4": Entry(NeuralOde, lambda n: (torch.randn(5 + n, 2),)),
    "neural_ode_euler": Entry(lambda: NeuralOde("euler"), lambda n: (torch.randn(5 + n, 2),)),
    "fourier_1d": Entry(Fourier1d, lambda n: (torch.randn(2 + n, 1, 32),)),
    "fno": Entry(lambda: FNO(**_OPERATOR), lambda n: (image(n, 1, 16),)),
    "tfno": Entry(lambda: TFNO(**_OPERATOR, rank=0.5), lambda n: (image(n, 1, 16),)),
    "deep_o_net": Entry(DeepONet, lambda n: (torch.randn(3 + n, 12), torch.rand(7 + n, 2))),
    "egnn": Entry(Egnn, _points),
    "simulator": Entry(Simulator, _particles),
    "pair_potential": Entry(Energy, lambda n: (torch.randn(3 + n, 5, 3),)),
    "siren": Entry(Siren, lambda n: (torch.rand(10 + n, 2),)),
    "kan": Entry(Kan, lambda n: (torch.rand(5 + n, 4) * 2 - 1,)),
    "real_nvp": Entry(Flow, lambda n: (torch.randn(5 + n, 4),)),
    "conv_lstm": Entry(ConvLstm, lambda n: (torch.randn(2 + n, 3, 1, 8, 8),)),
    "waves": Entry(Waves, lambda n: (torch.randn(2 + n, 16, 16),)),
    "lattice_boltzmann": Entry(Lattice, lambda n: (torch.rand(1 + n, 9, 8, 8) + 0.5,)),
    "spectral_poisson": Entry(SpectralPoisson, lambda n: (image(n, 1, 16),)),
    "ensemble": Entry(Ensemble, lambda n: (torch.randn(5 + n, 3),)),
    "gaussian_process": Entry(GaussianProcess, _observed),
}  # fmt: skip
