# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""`patch_accelerate` in processes of their own: what is replaced, where, and what comes back."""

import importlib
import inspect
import io
import pickle
import sys
import textwrap
import types
import warnings

import accelerate
import pytest
import torch
from ranks import run
from torch.utils.data import DataLoader, DistributedSampler

import accelerate_presharded
from accelerate_presharded import patch_accelerate


# By the names under which programs import them.
PLACES = {
    "Accelerator": ["accelerate", "accelerate.accelerator"],
    "DataLoaderConfiguration": [
        "accelerate",
        "accelerate.accelerator",
        "accelerate.utils",
        "accelerate.utils.dataclasses",
    ],
    "prepare_data_loader": ["accelerate.data_loader"],
    "skip_first_batches": ["accelerate", "accelerate.data_loader"],
}


def held() -> dict[tuple[str, str], str]:
    """Whose object each place holds."""
    return {
        (module, name): getattr(sys.modules[module], name).__module__.partition(".")[0]
        for name, modules in PLACES.items()
        for module in modules
    }


def module_from(source: str, name: str = "user_module") -> types.ModuleType:
    """A module that is in `sys.modules` as if it had been imported."""
    module = sys.modules[name] = types.ModuleType(name)
    exec(textwrap.dedent(source), vars(module))
    return module


def replaced_and_given_back():
    original = accelerate.Accelerator
    before = held()
    patch = patch_accelerate()
    during = held()
    same = accelerate.Accelerator is accelerate_presharded.Accelerator
    patch.undo()
    return before, during, same, held(), accelerate.Accelerator is original


def test_every_name_is_replaced_at_the_call_and_given_back():
    [(before, during, same, after, is_original)] = run(1, replaced_and_given_back)
    assert set(before.values()) == {"accelerate"} and before == after
    assert set(during.values()) == {"accelerate_presharded"}
    assert same and is_original


def with_block():
    with patch_accelerate() as patch:
        during = held()
    after = held()
    patch.undo()
    again = patch_accelerate()
    during_again = held()
    patch.undo()  # the first one's is over
    still = held()
    again.undo()
    return during, after, during_again, still, held()


def test_the_end_of_a_with_block_undoes_it_and_it_can_be_made_again():
    [(during, after, during_again, still, at_the_end)] = run(1, with_block)
    assert set(during.values()) == set(during_again.values()) == set(still.values()) == {"accelerate_presharded"}
    assert set(after.values()) == set(at_the_end.values()) == {"accelerate"}


def second_call():
    first = patch_accelerate()
    with patch_accelerate():
        inside = held()
    outside = held()
    first.undo()
    return inside, outside, held()


def test_a_second_call_changes_nothing_and_neither_does_its_undo():
    [(inside, outside, after)] = run(1, second_call)
    assert set(inside.values()) == set(outside.values()) == {"accelerate_presharded"}
    assert set(after.values()) == {"accelerate"}


def other_modules():
    plain = accelerate.Accelerator
    ours = accelerate_presharded.Accelerator
    before = module_from("from accelerate import Accelerator as Renamed, skip_first_batches as skip", "before")
    direct = module_from("from accelerate_presharded import Accelerator", "direct")
    main = sys.modules["__main__"]
    main.Accelerator = plain
    patch = patch_accelerate()
    during = (
        before.Renamed is ours,
        before.skip is accelerate_presharded.skip_first_batches,
        main.Accelerator is ours,
        direct.Accelerator is ours,
    )
    later = module_from("from accelerate import Accelerator\nours = Accelerator", "later")
    during += (later.Accelerator is ours,)
    before.skip = None  # the user's own change
    patch.undo()
    after = (
        before.Renamed is plain,
        before.skip is None,
        main.Accelerator is plain,
        direct.Accelerator is ours,
        later.Accelerator is plain and later.ours is plain,
    )
    return during, after


def test_modules_of_the_user_and_main():
    [(during, after)] = run(1, other_modules)
    assert all(during), during
    assert all(after), after


def imported_in_the_meantime(folder):
    sys.path.insert(0, folder)
    with patch_accelerate():
        modules = [importlib.import_module(name) for name in ("through_accelerate", "from_us", "inside")]
    ours, plain = accelerate_presharded.Accelerator, accelerate.Accelerator
    return ours is not plain, [{ours: "ours", plain: "plain"}[module.Accelerator] for module in modules]


def test_undo_leaves_what_a_module_imported_from_this_package_in_the_meantime(tmp_path):
    (tmp_path / "through_accelerate.py").write_text("from accelerate import Accelerator\n")
    (tmp_path / "from_us.py").write_text("from accelerate_presharded.accelerator import Accelerator\n")
    # A mention inside a function is not what has bound the name.
    (tmp_path / "inside.py").write_text(
        "from accelerate import Accelerator\ndef f():\n    import accelerate_presharded\n"
    )
    [(differ, held_by)] = run(1, imported_in_the_meantime, str(tmp_path))
    assert differ and held_by == ["plain", "ours", "plain"]


class Touchy(types.ModuleType):
    """A module that is not loaded yet, and notes whatever would load it."""

    def __getattribute__(self, name):
        object.__getattribute__(self, "__dict__").setdefault("touched", []).append(name)
        return super().__getattribute__(name)


class NoModule:
    """What some packages put into `sys.modules`."""

    def __getattr__(self, name):
        raise RuntimeError(name)


def lazy_modules(folder):
    sys.path.insert(0, folder)
    spec = importlib.util.find_spec("lazy")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = sys.modules["lazy"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    touchy = sys.modules["touchy"] = Touchy("touchy")
    sys.modules["no_module"] = NoModule()
    sys.modules["nothing"] = None
    with patch_accelerate():
        loaded = "lazy_was_loaded" in sys.modules
        ours = lazy.Accelerator is accelerate_presharded.Accelerator  # loads it
    plain = lazy.Accelerator is accelerate.Accelerator
    return loaded, "lazy_was_loaded" in sys.modules, ours, plain, vars(touchy).get("touched")


def test_lazy_modules_stay_lazy(tmp_path):
    (tmp_path / "lazy.py").write_text(
        "import sys\nsys.modules['lazy_was_loaded'] = sys\nfrom accelerate import Accelerator\n"
    )
    [(loaded, loaded_later, ours, plain, touched)] = run(1, lazy_modules, str(tmp_path))
    assert not loaded and loaded_later and ours and plain
    assert touched in (None, ["__dict__"])  # by the `vars` of this test


def subclasses():
    with patch_accelerate():
        user = module_from(
            """
            from accelerate import Accelerator, DataLoaderConfiguration
            class Mine(Accelerator):
                def prepare(self, *args, **kwargs):
                    return super().prepare(*args, **kwargs)
            """
        )
        mine = user.Mine(cpu=True, dataloader_config=user.DataLoaderConfiguration(already_sharded=True))
        loader = mine.prepare(DataLoader(range(6), batch_size=2))
        found = [
            issubclass(user.Mine, accelerate_presharded.Accelerator),
            isinstance(mine, accelerate.Accelerator),
            isinstance(mine.dataloader_config, accelerate.DataLoaderConfiguration),
            isinstance(mine.dataloader_config, accelerate.utils.DataLoaderConfiguration),
        ]
    found += [isinstance(mine, accelerate.Accelerator), issubclass(user.Mine, accelerate.Accelerator)]
    return found, [batch.tolist() for batch in loader]


def test_subclasses_that_are_defined_later_leave_sharded_loaders_alone():
    for found, batches in run(2, subclasses):
        assert all(found)
        # Plain Accelerate would give each rank every second batch.
        assert batches == [[0, 1], [2, 3], [4, 5]]


def earlier_subclass():
    user = module_from("from accelerate import Accelerator\nclass Mine(Accelerator): pass")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch_accelerate()
    mine = user.Mine(cpu=True)
    sampler = DistributedSampler(range(8), mine.num_processes, mine.process_index, shuffle=False)
    loader = mine.prepare(DataLoader(range(8), sampler=sampler))
    return [(str(entry.message), entry.filename) for entry in caught], len(list(loader))


def test_subclasses_that_were_defined_earlier_are_named_and_stay_plain():
    for messages, length in run(2, earlier_subclass):
        [(message, filename)] = messages
        assert "`user_module.Mine`" in message and "before `patch_accelerate()`" in message
        assert filename == __file__
        assert length == 2  # 4 of 8 are this rank's, and Accelerate shards them again


def prepared_by_code_that_knows_nothing(patched):
    library = module_from(
        """
        from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
        from accelerate.data_loader import prepare_data_loader

        def build(**kwargs):
            return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**kwargs))
        """
    )
    if patched:
        patch_accelerate()
    accelerator = library.build()
    rank, size = accelerator.process_index, accelerator.num_processes

    def loader():
        return DataLoader(range(18), batch_size=2, sampler=DistributedSampler(range(18), size, rank, shuffle=False))

    prepared = accelerator.prepare(loader())
    gathered = [sample for batch in prepared for sample in accelerator.gather_for_metrics(batch).tolist()]
    # Plain Accelerate has less than 3 batches to skip, and version 1.8 fails where nothing is left.
    skipped = [batch.tolist() for batch in library.skip_first_batches(prepared, 3)] if patched else None
    function = [batch.tolist() for batch in library.prepare_data_loader(loader(), num_processes=size)]
    ordinary = [batch.tolist() for batch in accelerator.prepare(DataLoader(range(8), batch_size=2))]
    return gathered, skipped, function, ordinary


def test_a_library_that_builds_its_own_accelerator():
    plain, patched = (
        run(2, prepared_by_code_that_knows_nothing, False),
        run(2, prepared_by_code_that_knows_nothing, True),
    )
    for rank in range(2):
        gathered, skipped, function, ordinary = patched[rank]
        own = list(range(rank, 18, 2))
        batches = [own[start : start + 2] for start in range(0, 9, 2)]
        assert sorted(gathered) == list(range(18))
        assert skipped == batches[3:]
        assert function == batches
        assert ordinary == plain[rank][3] == [[2 * rank, 2 * rank + 1], [2 * rank + 4, 2 * rank + 5]]
        assert len(plain[rank][0]) < 18  # or this test shows nothing


def explicitly_not_sharded():
    patch_accelerate()
    accelerator = accelerate.Accelerator(cpu=True)
    sampler = DistributedSampler(range(16), accelerator.num_processes, accelerator.process_index, shuffle=False)
    loader = accelerator.prepare(DataLoader(range(16), batch_size=2, sampler=sampler), already_sharded=False)
    return type(loader) is accelerate_presharded.PreshardedDataLoader, len(list(loader))


def test_the_users_word_reaches_accelerates_own_code():
    # 8 of 16 are this rank's: 4 batches of 2, and once more sharded 2.
    assert run(2, explicitly_not_sharded) == [(False, 2)] * 2


def other_uses():
    plain = {name: inspect.signature(getattr(accelerate, name)) for name in ("Accelerator", "DataLoaderConfiguration")}
    with patch_accelerate():
        signatures = {name: inspect.signature(getattr(accelerate, name)) for name in plain}
        configuration = accelerate.DataLoaderConfiguration(even_batches=False, already_sharded=True)
        stream = io.BytesIO()
        torch.save(configuration, stream)
        pickled = pickle.dumps(configuration)
    restored = pickle.loads(pickled)
    more = set(signatures["DataLoaderConfiguration"].parameters) - set(plain["DataLoaderConfiguration"].parameters)
    return signatures["Accelerator"] == plain["Accelerator"], more, restored == configuration, stream.tell() > 0


def test_signatures_and_pickles():
    assert run(1, other_uses) == [(True, {"already_sharded"}, True, True)]


def test_names_are_imported_when_they_are_asked_for():
    assert set(accelerate_presharded.__all__) <= set(dir(accelerate_presharded))
    for name in accelerate_presharded.__all__:
        assert getattr(accelerate_presharded, name).__module__.startswith("accelerate_presharded.")
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_this_name'"):
        accelerate_presharded.nothing_of_this_name
