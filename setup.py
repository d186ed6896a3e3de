# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.

from pathlib import Path

from setuptools import find_packages, setup


extras = {
    "audit": ["matplotlib", "rich"],
    "test": ["pytest", "pytest-xdist", "parameterized", "hypothesis", "cloudpickle", "torchdata", "libcst"],
    "quality": ["ruff"],
    "examples": ["scikit-learn"],
    "libraries": ["datasets", "lhotse", "torchdata", "transformers>=5", "webdataset"],
    "benchmarks": ["matplotlib", "torchdata"],
    "docs": ["mkdocs", "pygments"],
}
extras["dev"] = sorted({requirement for group in extras.values() for requirement in group})
# In an environment of its own: these need an older transformers, and torchvision.
extras["streaming"] = ["cloudpickle", "litdata", "mosaicml-streaming", "pytest"]

setup(
    name="accelerate-presharded",
    version="0.1.0",
    description="Accelerate, with DataLoaders that are already sharded across ranks as a first-class input.",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author="The accelerate-presharded authors",
    keywords="deep learning, distributed training, data loading, sharding, accelerate, pytorch",
    package_dir={"": "src"},
    packages=find_packages("src"),
    package_data={"accelerate_presharded": ["py.typed"]},
    zip_safe=False,
    python_requires=">=3.10",
    entry_points={"console_scripts": ["accelerate-presharded = accelerate_presharded.cli:main"]},
    install_requires=["torch>=2.4", "accelerate>=1.8,<1.16"],
    extras_require=extras,
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
