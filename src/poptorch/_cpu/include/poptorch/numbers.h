#pragma once
// Numbers of other kinds have names only: torch's templates ask whether a type is one of them.
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <c10/macros/Macros.h>
#include <c10/util/bit_cast.h>
namespace c10 {
struct Half { unsigned short x; };
struct BFloat16 { unsigned short x; };
struct Float8_e4m3fn { unsigned char x; };
struct Float8_e4m3fnuz { unsigned char x; };
struct Float8_e5m2 { unsigned char x; };
struct Float8_e5m2fnuz { unsigned char x; };
template <typename T> struct complex;
template <typename T> struct is_complex : std::false_type {};
template <typename T> constexpr bool is_reduced_floating_point_v = false;
template <typename T> constexpr T ln_2 = static_cast<T>(0.69314718055994530942L);
template <typename T> constexpr T pi = static_cast<T>(3.14159265358979323846L);
template <typename T, typename U> auto copysign(const T& a, const U& b) {
  return std::copysign(a, b);
}
template <typename To, typename From> inline To convert(From value) {
  return static_cast<To>(value);
}
}  // namespace c10
namespace at {
using namespace c10;
template <typename T> inline bool _isnan(T value) {
  if constexpr (std::is_floating_point_v<T>) return std::isnan(value);
  return false;
}
namespace native {
template <typename T> T angle_impl(T);
template <typename T> T sgn_impl(T);
template <typename T> T ceil_impl(T value) { return std::ceil(value); }
template <typename T> T floor_impl(T value) { return std::floor(value); }
template <typename T> T round_impl(T value) { return std::nearbyint(value); }
template <typename T> T trunc_impl(T value) { return std::trunc(value); }
}  // namespace native
}  // namespace at
template <typename T> T exp2_impl(T value) { return std::exp2(value); }
template <typename T> T calc_erfinv(T);
template <typename T> T calc_i0(T);
template <typename T> T calc_i0e(T);
template <typename T> T calc_digamma(T);
template <typename T> T calc_igamma(T, T);
template <typename T> T calc_igammac(T, T);
#define TORCH_CHECK(condition, ...) \
  if (!(condition)) throw std::runtime_error(#condition);
#define TORCH_INTERNAL_ASSERT TORCH_CHECK
#define C10_UNLIKELY_OR_CONST(condition) C10_UNLIKELY(condition)
