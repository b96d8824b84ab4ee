"""Compile graphs for CPUs with torch's compiler: the backend ``inductor``.

What happens to a graph
-----------------------

1. ``prepared`` moves out of an inference program what depends only on weights. ``folding`` puts
   factors of channels into weights, and ``packing`` stores weights as libraries read them fastest.
2. ``compiler`` compiles one graph. ``refusals`` adds the checks that eager kernels make.
   ``repeated_layers`` cuts the graph where layers repeat, and ``chains`` joins the code of the
   pieces.
3. ``lowering`` rewrites the graph in torch's primitive operators. Our ``kernels`` replace operators
   where their conditions hold: ``attention``, ``convolutions`` and ``pooling`` over ``windows``,
   ``digamma``, ``norms`` and ``product_kernels``. Their files say how much time they save in a
   step. ``corrections`` replaces operators for which torch has wrong code or none.
4. Torch's compiler generates C++ code. ``kernel_templates`` shortens the import of this compiler.
   ``in_place_writes`` puts updates of the state where they save memory, and ``product_kernels``
   calls the libraries that ``product_libraries`` has measured. ``compile_speedups`` replaces
   functions of torch that take long, and ``unneeded_work`` those whose results are known or unused.
5. The C++ compiler (``toolchain``) reads the few ``headers`` that the code needs, and
   ``compiled_code`` stores the result. ``joint_kernels`` builds the kernels of code that stays in
   Python.

What only saves time is left out in a second attempt if the first one fails. Names of torch that may
disappear are rows of ``_base/private.toml``, which say what is lost without them.

What each replacement saves
---------------------------

The first column of times is how much longer a compilation with empty caches takes without the
replacement, in processor seconds of Python and the C++ compiler. With all of them, a perceptron
takes 3.9 s, the tutorial's CNN 6.2 s, a BERT with 4 layers 9.4 s, and a ResNet-18 with 16 channels
27 s. Shares are of the calls of Python functions, 6.23 million for the CNN, which do not depend on
the machine. Measured with torch 2.13 on an AMD EPYC with AVX-512, alternating, on a shared
machine, where the seconds of one program vary by up to a fifth.

| replacement | in | without it |
|---|---|---|
| few headers | ``headers`` | 3.1 s (perceptron), 4.0 s (CNN), 4.4 s (BERT) |
| an empty library in the place of torch's | ``headers`` | 0.3 s for each library |
| ``check_build``: AMX and others are not tried | ``compile_speedups`` | 1.4 s, once per machine |
| ``vec_isa_ok``: vectors are not tried out | ``compile_speedups`` | 9 s more without both |
| no precompiled headers | ``compile_speedups`` | 7.9 s, once per machine |
| the wrapper's longest function with -O1 | ``compile_speedups`` | 0.4 to 0.9 s (CNN) |
| the wrapper as a source with -O1 | ``compile_speedups`` | 3.7 s (ResNet) |
| ``stride`` without sympy | ``compile_speedups`` | 88 % more calls, 3.1 s (CNN) |
| one handler for the types of results | ``compile_speedups`` | 8 % more calls |
| patterns that are traced only if they may apply | ``compile_speedups`` | 6 % more calls |
| ``simplify`` without ranges | ``compile_speedups`` | 4 % more calls |
| torch's folders without setuptools | ``compile_speedups`` | 0.07 s |
| templates are parsed when they are used | ``kernel_templates`` | 0.2 s, once per process |
| equal ranges are not simplified | ``compile_speedups`` | 0.04 s (perceptron), 0.12 s (CNN) |
| loops that never run are not written | ``unneeded_work`` | 4 % more calls |
| values behind products are kept | ``unneeded_work`` | 1.3 % more calls |
| indices are simplified once | ``unneeded_work`` | 1.1 % more calls |
| layers that repeat are compiled once | ``repeated_layers`` | 8.8 s (BERT) |
| common subexpressions are removed first | ``lowering`` | 6 % more calls |
| kernels that Python calls are one library | ``joint_kernels`` | 4.1 s (perceptron), 8.8 s (CNN) |

What hardly varies, with the oldest and the newest release, by ``compile_speedups.py --counts``:

| without | torch 2.13 | torch 2.15 |
|---|---|---|
| few headers | the C++ compiler reads 3.0 times as much | 3.0 (perceptron) to 3.4 (BERT) |
| ``stride`` | 89 % more calls | 5 % |
| one handler | 8 % more calls | none |
| patterns | 6 % more calls | 7 % |
| ``simplify`` | 4 % more calls | 4 % |
| layers that repeat | | 177 % more calls |
| common subexpressions | 6 % more calls | 7 % |

``stride`` and the handler save little with torch 2.15. They remain because of torch 2.13.

Two replacements have other reasons. ``split_if_equal`` lets graphs compile for which torch's
assertion fails. A wrapper in C++ compiles in 0.6 s more than one in Python (CNN), but it can be
stored and cut into pieces, and a call takes 0.04 ms less.
"""

from .backend import Inductor
