# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""`Accelerator` with the keyword `already_sharded`. No logic lives here, and every ordinary loader reaches `super()`."""

from __future__ import annotations

import accelerate

from .auditing import ShardingReport, audit
from .checkpointing import load_with_loaders, save_with_loaders
from .data_loader import (
    PreshardedDataLoader,
    flag_of,
    leave_presharded_alone,
    note_flags,
    skip_first_batches,
    warn_of_scheduler,
)
from .joining import join_with_presharded
from .metrics import gather_real


class Accelerator(accelerate.Accelerator):
    """
    Accelerate's [`~accelerate.Accelerator`], for which a loader that is already sharded across ranks is as good an
    input as any other. It takes the same arguments.

    Example:

    ```python
    >>> from torch.utils.data import DataLoader, DistributedSampler
    >>> from accelerate_presharded import Accelerator

    >>> accelerator = Accelerator()
    >>> sampler = DistributedSampler(range(16), accelerator.num_processes, accelerator.process_index)
    >>> loader = accelerator.prepare(DataLoader(range(16), batch_size=4, sampler=sampler))
    ```
    """

    @property
    def already_sharded(self) -> bool | None:
        return getattr(self.dataloader_config, "already_sharded", None)

    def prepare(self, *args, device_placement=None, already_sharded=None):
        """
        Prepare models, optimizers, loaders and schedulers, in any number and order, and return them in that order.

        Args:
            *args (list of objects):
                What Accelerate's own [`~accelerate.Accelerator.prepare`] takes; where `already_sharded` is `True`
                also any other iterable of batches.
            device_placement (`list[bool]`, *optional*):
                Whether to place each of the objects on the device.
            already_sharded (`bool` or `list[bool]`, *optional*):
                Whether the loaders are already sharded across ranks: `True` leaves them alone, `False` shards them,
                `None` asks the configuration, and then detects it. One value for all, or a list with one for each
                object; the entries of objects that are not loaders are ignored.

        Returns:
            `tuple`: The prepared objects, or the one prepared object.

        Raises:
            `ValueError`: `already_sharded` is a list of another length than `args`, or a loader cannot be used in
            that way, see [`prepare_data_loader`].

        Example:

        ```python
        >>> from torch.utils.data import DataLoader
        >>> from accelerate_presharded import Accelerator

        >>> accelerator = Accelerator()
        >>> train, test = DataLoader(range(8)), DataLoader(range(8))
        >>> train, test = accelerator.prepare(train, test, already_sharded=[True, False])
        ```
        """
        args = note_flags(self, args, device_placement, already_sharded)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_data_loader(
        self, data_loader, device_placement=None, slice_fn_for_dispatch=None, already_sharded: bool | None = None
    ):
        """
        Prepare one loader. It is recommended to use [`Accelerator.prepare`] instead.

        Args:
            data_loader (`torch.utils.data.DataLoader`, or any iterable of batches with `already_sharded=True`):
                The loader to prepare. One that has been prepared before is returned unchanged.
            device_placement (`bool`, *optional*):
                Whether to place the batches on the device. Defaults to the `device_placement` of the `Accelerator`.
            slice_fn_for_dispatch (`Callable`, *optional*):
                Only for ordinary loaders that are dispatched.
            already_sharded (`bool`, *optional*):
                Whether the loader is already sharded across ranks: `True` leaves it alone, `False` shards it, `None`
                asks the configuration, and then detects it.

        Returns:
            `torch.utils.data.DataLoader`: The prepared loader.

        Raises:
            `ValueError`: The loader cannot be used in that way, see [`prepare_data_loader`].

        Example:

        ```python
        >>> from torch.utils.data import DataLoader
        >>> from accelerate_presharded import Accelerator

        >>> accelerator = Accelerator()
        >>> loader = accelerator.prepare_data_loader(DataLoader(range(8)), already_sharded=True)
        ```
        """
        already_sharded = flag_of(self, data_loader, already_sharded)
        # upstream: in prepare_data_loader(already_sharded=already_sharded)
        # upstream: then note_prepared(self, data_loader)
        data_loader = leave_presharded_alone(self, data_loader, device_placement, already_sharded)
        return super().prepare_data_loader(
            data_loader, device_placement=device_placement, slice_fn_for_dispatch=slice_fn_for_dispatch
        )

    def skip_first_batches(self, dataloader, num_batches: int = 0):
        """
        Return a loader that leaves out the first batches of a prepared loader, see [`skip_first_batches`].

        Args:
            dataloader (`torch.utils.data.DataLoader`):
                The prepared loader.
            num_batches (`int`, *optional*, defaults to 0):
                How many batches to leave out, on this rank as on every other.

        Returns:
            `torch.utils.data.DataLoader`: A loader over the same data.

        Example:

        ```python
        >>> from torch.utils.data import DataLoader
        >>> from accelerate_presharded import Accelerator

        >>> accelerator = Accelerator()
        >>> loader = accelerator.prepare(DataLoader(range(8)), already_sharded=True)
        >>> len(list(accelerator.skip_first_batches(loader, 3)))
        5
        ```
        """
        # upstream: nothing, since the function that the method calls has the same guard
        if isinstance(dataloader, PreshardedDataLoader):
            return skip_first_batches(dataloader, num_batches)
        return super().skip_first_batches(dataloader, num_batches=num_batches)

    def prepare_scheduler(self, scheduler):
        """
        Prepare a scheduler, exactly as Accelerate does, and say what that means next to an already sharded loader.

        Args:
            scheduler (`torch.optim.lr_scheduler.LRScheduler`):
                The scheduler to prepare.

        Returns:
            [`~accelerate.scheduler.AcceleratedScheduler`]: The prepared scheduler.

        Example:

        ```python
        >>> import torch
        >>> from accelerate_presharded import Accelerator

        >>> accelerator = Accelerator()
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.LinearLR(optimizer))
        ```
        """
        warn_of_scheduler(self)
        return super().prepare_scheduler(scheduler)

    def gather_for_metrics(self, input_data, use_gather_object=False):
        """
        Gather data from all ranks for a metric: inside the loop over an already sharded loader every real sample once,
        without replays and without padding, in rank order; otherwise as Accelerate does.

        Args:
            input_data (`torch.Tensor`, `object`, or any nesting of tuples, lists and dictionaries of them):
                What this rank has made of its batch.
            use_gather_object (`bool`, *optional*, defaults to `False`):
                Whether to send tensors as objects, for those that cannot be concatenated.

        Returns:
            `Any`: The same structure, with tensors concatenated and lists joined over all ranks.

        Raises:
            `ValueError`: The structure, or a dimension other than the first, differs between ranks.

        Example:

        ```python
        >>> from torch.utils.data import DataLoader
        >>> from accelerate_presharded import Accelerator

        >>> accelerator = Accelerator()
        >>> loader = accelerator.prepare(DataLoader(range(9), batch_size=5), already_sharded=True)
        >>> sum(len(accelerator.gather_for_metrics(batch)) for batch in loader)
        9
        ```
        """
        loader = self.gradient_state.active_dataloader
        if isinstance(loader, PreshardedDataLoader):
            return gather_real(input_data, loader.samples_in_step, use_gather_object)
        return super().gather_for_metrics(input_data, use_gather_object=use_gather_object)

    def join_uneven_inputs(self, joinables, even_batches=None):
        """
        Return a context in which ranks may make different numbers of steps, see Accelerate's own
        [`~accelerate.Accelerator.join_uneven_inputs`]. Already sharded loaders take part in it.

        Args:
            joinables (`list[torch.distributed.algorithms.Joinable]`):
                The models or optimizers to join.
            even_batches (`bool`, *optional*):
                For this time, whether all ranks make the same number of steps. Defaults to what the loaders were
                prepared with.

        Example:

        ```python
        >>> from accelerate_presharded import Accelerator

        >>> accelerator = Accelerator()
        >>> with accelerator.join_uneven_inputs([], even_batches=False):
        ...     pass
        ```
        """
        if any(isinstance(loader, PreshardedDataLoader) for loader in self._dataloaders):
            return join_with_presharded(self, super().join_uneven_inputs, joinables, even_batches)
        return super().join_uneven_inputs(joinables, even_batches=even_batches)

    def save_state(self, output_dir=None, safe_serialization=True, **save_model_func_kwargs):
        """
        Save what Accelerate saves, and how far each rank has come in its already sharded loaders.

        Args:
            output_dir (`str` or `os.PathLike`, *optional*):
                The folder to save to, as for Accelerate's own [`~accelerate.Accelerator.save_state`].
            safe_serialization (`bool`, *optional*, defaults to `True`):
                Whether to save the model with `safetensors`.
            save_model_func_kwargs (`dict`, *optional*):
                More arguments for saving the model.

        Returns:
            `str`: The folder.

        Example:

        ```python
        >>> from accelerate_presharded import Accelerator

        >>> accelerator = Accelerator()
        >>> folder = accelerator.save_state("checkpoint")
        ```
        """
        save_with_loaders(self)
        return super().save_state(output_dir, safe_serialization=safe_serialization, **save_model_func_kwargs)

    def load_state(self, input_dir=None, load_kwargs=None, **load_model_func_kwargs):
        """
        Load what Accelerate loads, and have each rank go on where it had come to in its already sharded loaders.

        A loader that keeps a state of its own goes on with its next batch. Any other gets its epoch back, and
        [`Accelerator.skip_first_batches`] with the loader's `batches_yielded` goes to the batch.

        Args:
            input_dir (`str` or `os.PathLike`, *optional*):
                The folder to load from, as for Accelerate's own [`~accelerate.Accelerator.load_state`].
            load_kwargs (`dict`, *optional*):
                More arguments for loading the model.
            load_model_func_kwargs (`dict`, *optional*):
                More arguments for loading the model.

        Raises:
            `ValueError`: The state of a loader is missing on some ranks, broken, or that of another number of ranks.
            The same on all ranks, and nothing is loaded.

        Example:

        ```python
        >>> from accelerate_presharded import Accelerator

        >>> accelerator = Accelerator()
        >>> accelerator.load_state(accelerator.save_state("checkpoint"))
        ```
        """
        load_with_loaders(self)
        return super().load_state(input_dir, load_kwargs=load_kwargs, **load_model_func_kwargs)

    def audit(self, loader, key=None, max_batches=None, before=None) -> ShardingReport:
        """
        Read a loader once on every rank and report who has seen which sample, without a change to training. See
        [`audit`].

        Args:
            loader (`torch.utils.data.DataLoader` or any iterable of batches):
                This rank's loader, prepared or not.
            key (`str`, `int` or `Callable`, *optional*):
                What to tell samples apart by: the name or index of a field, or a function of a sample. By default it is
                all of their content.
            max_batches (`int`, *optional*):
                How many batches of each rank to read at most. For streams that never end.
            before ([`ShardingReport`], *optional*):
                The report of the same data before `prepare`. What was seen then and is not seen now counts as missed.

        Returns:
            [`ShardingReport`]: The same on all ranks.

        Raises:
            `ValueError`: The samples cannot be told apart that way, or the arguments make no sense.
            `RuntimeError`: Reading has failed on another rank, which is named.

        Example:

        ```python
        >>> from torch.utils.data import DataLoader
        >>> from accelerate_presharded import Accelerator

        >>> accelerator = Accelerator()
        >>> loader = accelerator.prepare(DataLoader(range(16), batch_size=4))
        >>> accelerator.audit(loader).assert_complete()
        ```
        """
        return audit(loader, self, key=key, max_batches=max_batches, before=before)
