#pragma once
#if defined(__GNUC__) && !defined(__clang__)
#define _IMMINTRIN_H_INCLUDED
#if __has_include(<x86gprintrin.h>)
#include <x86gprintrin.h>
#endif
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <avx512fintrin.h>
#include <avx512cdintrin.h>
#include <avx512vlintrin.h>
#include <avx512bwintrin.h>
#include <avx512dqintrin.h>
#include <avx512vlbwintrin.h>
#include <avx512vldqintrin.h>
#include <fmaintrin.h>
#include <f16cintrin.h>
#else
#include_next <immintrin.h>
#endif
