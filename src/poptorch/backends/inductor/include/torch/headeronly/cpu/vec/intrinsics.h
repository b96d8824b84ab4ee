#pragma once
#if defined(__GNUC__) && !defined(__clang__)
#define _AVX512FP16INTRIN_H_INCLUDED
#define _AVX512FP16VLINTRIN_H_INCLUDED
#endif
#include <immintrin.h>
