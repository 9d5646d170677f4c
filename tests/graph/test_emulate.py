"""The emulated device: installed on request only, and doing what the checks say."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import TOOLS, run, run_forked


@pytest.mark.parametrize("group", ["eager", "compiled", "transformers", "distributed"])
def test_device(group):
    done = run_forked(str(TOOLS / "emulated_checks.py"), group)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_importing_torchair_installs_nothing():
    done = run(
        "-c",
        """if True:
        import importlib.util, sys, torch, torchair
        assert not hasattr(torch, "npu") and not hasattr(torch.Tensor, "npu")
        assert torch._C._get_privateuse1_backend_name() == "privateuseone"
        assert importlib.util.find_spec("torch_npu") is None
        assert not any(m.startswith("torchair.ascend.emulate") for m in sys.modules)
        import torchair.ascend.emulate
        assert not hasattr(torch, "npu") and not torchair.ascend.emulate.installed()
        assert torchair.ascend.emulate.why_not() is None
    """,
    )
    assert done.returncode == 0, done.stderr


def test_installing_is_light():
    done = run(
        "-c",
        """if True:
        import sys, torchair.ascend.emulate
        torchair.ascend.emulate.install()
        import torch_npu
        assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
    """,
    )
    assert done.returncode == 0, done.stderr


def test_the_package_tells_what_it_has():
    done = run(
        "-c",
        """if True:
        import importlib.util, sys
        import torchair, torchair.ascend.emulate
        assert torchair.ascend.emulate.install(3)
        import torch, torch_npu, torch_npu.npu, torch_npu.profiler, torch.npu.amp
        from torch_npu.dynamo import torchair as same
        from torch_npu.dynamo.torchair.configs.compiler_config import CompilerConfig
        from torch_npu.dynamo import npugraph_ex
        from torch_npu.dynamo.npugraph_ex.npu_fx_compiler import get_npu_backend
        from torch_npu.npu.amp import autocast
        assert npugraph_ex is torchair.npugraph_ex
        assert get_npu_backend is npugraph_ex.get_npu_backend
        assert same is torchair and CompilerConfig is torchair.CompilerConfig
        assert torch_npu.npu is torch.npu and torch.npu.device_count() == 3
        assert importlib.util.find_spec("torch_npu") is not None
        assert torch_npu.__version__.startswith(torch.__version__.partition("+")[0])
        assert torchair.__spec__.name == "torchair"
        try:
            torch_npu.npu_rms_nrom
        except AttributeError as e:
            print(e)
        try:
            import torch_npu.nonsense
        except ModuleNotFoundError as e:
            print(e)
        try:
            torchair.ascend.emulate.install(4)
        except RuntimeError as e:
            print(e)
    """,
    )
    assert done.returncode == 0, done.stderr
    unknown, module, again = done.stdout.splitlines()
    assert unknown.startswith("torch_npu.npu_rms_nrom is not part of the emulation. Did you mean")
    assert " npu_rms_norm" in unknown and "It has: " in unknown and "profiler" in unknown
    assert module == "No module named 'torch_npu.nonsense'"
    assert again == "3 emulated devices are installed already"


def make_distribution(folder: Path) -> None:
    info = folder / "torch_npu-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 9.9\n")


REPORT = """
import sys, torch, torchair
print(hasattr(torch, "npu"), torch._C._get_privateuse1_backend_name(), *sys.argv[1:])
import torch_npu
print(torch_npu.WHO)
"""


@pytest.mark.parametrize("with_metadata", [True, False])
def test_a_real_package_is_left_alone(tmp_path, with_metadata):
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("WHO = 'the real one'\n")
    if with_metadata:
        make_distribution(tmp_path)
    (tmp_path / "script.py").write_text(REPORT)
    done = run("-m", "torchair", "run", str(tmp_path / "script.py"), "x", path=str(tmp_path))
    assert done.stdout.splitlines() == ["False privateuseone x", "the real one"], done.stderr


def test_a_distribution_alone_is_enough_to_step_aside(tmp_path):
    make_distribution(tmp_path)
    code = """if True:
        import sys, torch, torchair.ascend.emulate
        before = list(sys.meta_path)
        assert not torchair.ascend.emulate.install()
        assert sys.meta_path == before and not hasattr(torch, "npu")
        print(torchair.ascend.emulate.why_not())
    """
    done = run("-c", code, path=str(tmp_path))
    assert done.stdout == "torch_npu 9.9 is installed and used as it is\n", done.stderr


def test_another_device_is_left_alone():
    done = run(
        "-c",
        """if True:
        import torch, torchair.ascend.emulate
        torch.utils.rename_privateuse1_backend("other")
        assert not torchair.ascend.emulate.install()
        print(torchair.ascend.emulate.why_not())
    """,
    )
    assert "'other'" in done.stdout, done.stderr


def test_visible_devices_are_counted():
    done = run_forked(
        "-c",
        """if True:
        import os
        os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "0, 2"
        import torch, torchair.ascend.emulate
        torchair.ascend.emulate.install()
        print(torch.npu.device_count())
    """,
    )
    assert done.stdout == "2\n", done.stderr


def test_weights_in_formats_of_the_device():
    done = run_forked(
        "-c",
        """if True:
        import torch, torchair, torchair.ascend.emulate
        from torchair.experimental.inference import use_internal_format_weight
        model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1).half(), torch.nn.Linear(4, 4))
        before = {k: v.clone() for k, v in model.state_dict().items()}
        use_internal_format_weight(model)  # an error in the log: no torch_npu
        torchair.ascend.emulate.install()
        import torch_npu
        try:
            torchair.use_internal_format_weight(model)
        except RuntimeError as e:
            assert "Conv2d.weight is on the CPU" in str(e)
        else:
            raise AssertionError("a weight on the CPU was taken")
        model.npu()
        addresses = [p.data_ptr() for p in model.parameters() if p.dim() > 1]
        torchair.use_internal_format_weight(model)
        assert addresses != [p.data_ptr() for p in model.parameters() if p.dim() > 1]
        for k, v in model.state_dict().items():
            assert v.device.type == "npu" and torch.equal(v.cpu(), before[k])
        class QuantConv2d(torch.nn.Conv2d):
            pass
        quantised = QuantConv2d(2, 3, 1).requires_grad_(False).npu()
        quantised.weight.data = quantised.weight.data.to(torch.int8)
        quantised.scale = torch.ones(3).npu()
        packed = torch.ops.npu.npu_trans_quant_param(quantised.scale)
        torchair.use_internal_format_weight(quantised)
        assert quantised.scale.dtype == torch.int64 and torch.equal(quantised.scale, packed)
        x = torch.randn(3, 4).npu()
        y = torchair.npu_format_cast_via_cpu(x, 29)
        assert torch.equal(x.cpu(), y.cpu()) and y.device == x.device
        assert y.data_ptr() != x.data_ptr()
        try:
            torchair.npu_format_cast_via_cpu(x, 1000)
        except RuntimeError as e:
            assert "1000 is not a format" in str(e)
        else:
            raise AssertionError("1000 is a format")
    """,
    )
    assert done.returncode == 0, done.stderr
    assert "use_internal_format_weight needs torch_npu" in done.stderr + done.stdout


def test_graphs_made_by_hand_run_on_the_device():
    done = run_forked(
        "-c",
        """if True:
        import torchair.ascend.emulate
        torchair.ascend.emulate.install()
        import torch, torch_npu, torchair
        from torchair._ge_concrete_graph import ge_apis as ge
        from torchair.core import _npu_graph_executor
        from torchair.core._backend import TorchNpuGraph
        from torchair.ge._ge_graph import DataType, GeGraph
        with GeGraph() as graph:
            x = ge.Data(index=0, shape=[-1, 2], dtype=DataType.DT_FLOAT, placement="NPU")
            y = ge.Data(index=1, shape=[], dtype=DataType.DT_FLOAT, placement="CPU")
            ge.NetOutput([ge.Add(x, y), ge.Neg(x)])
        executor = TorchNpuGraph()
        executor.load(graph)
        executor.compile()
        x, y = torch.ones(2, 2).npu(), torch.tensor(3.0)
        total, negative = executor.run([x, y])
        assert total.device == negative.device == x.device and total.cpu().eq(4).all()
        total, negative = executor.run([x, y], [x])
        assert total is x and x.cpu().eq(4).all() and negative.cpu().eq(-1).all()
        (host, _) = executor.run([torch.ones(3, 2), y])
        assert host.is_cpu and host.eq(4).all()
        assert _npu_graph_executor.GetNpuStorageSizes(x) == [2, 2]
    """,
    )
    assert done.returncode == 0, done.stderr


def test_tensors_over_addresses():
    done = run_forked(
        "-c",
        """if True:
        import torch, torchair
        def refused(kind, text, *args):
            try:
                torchair.llm_datadist.create_npu_tensors(*args)
            except kind as e:
                assert text in str(e), e
            else:
                raise AssertionError(f"{args} were taken")
        host = torch.zeros(2, 12)
        places = [host[0].data_ptr(), host[1].data_ptr()]
        create = torchair.llm_datadist.create_npu_tensors
        a, b = create([3, 4], torch.float32, places)
        a.fill_(1), b.fill_(2)
        assert host[0].eq(1).all() and host[1].eq(2).all() and a.is_cpu
        refused(TypeError, "shape must be a list", 3, torch.float32, places)
        refused(TypeError, "shape must hold integers", [3, 4.0], torch.float32, places)
        refused(TypeError, "addresses must be a list", [3], torch.float32, places[0])
        refused(TypeError, "addresses must hold integers", [3], torch.float32, ["0"])
        refused(TypeError, "must be a torch.dtype", [3], "float32", places)
        refused(ValueError, "takes no torch.complex32", [3], torch.complex32, places)
        refused(RuntimeError, "no address", [3], torch.float32, [0])
        assert create([0], torch.float32, [0])[0].shape == (0,)
        import torchair.ascend.emulate
        torchair.ascend.emulate.install()
        import torch_npu
        (c,) = create((3, 4), torch.float32, places[:1])
        assert c.device.type == "npu"
        c.add_(5)
        assert host[0].eq(6).all()
    """,
    )
    assert done.returncode == 0, done.stderr
