// The parts of nvcc and its headers that candle's unmodified CUDA kernels need, for a host compiler: with `emulator.h`,
// they run on a CPU. Half-precision operators compute in FP32 and round once, as on a GPU. FP8 is declared, but
// refused.
#pragma once

#define EMULATOR_TYPES_WITH_OPERATORS
#include "emulator.h"

#include <cmath>
#include <cstdint>
#include <type_traits>

#define __CUDA_ARCH__ 800
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#ifndef __global__
#define __global__
#endif
#define __host__
// Blocks run one after the other.
#define __shared__ static
#undef assert
#define assert(condition) ((condition) ? (void)0 : emulator::refuse("the assertion `" #condition "` failed", __LINE__))

namespace emulator {

// A number stored as `Bits` and computed with as float.
template <class Own, class Bits, Bits (*ROUND)(float), float (*WIDEN)(Bits)> struct Number : Bits {
    Number() = default;
    Number(Bits bits) : Bits(bits) {}
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>> Number(T value) : Bits(ROUND(static_cast<float>(value))) {}
    operator float() const { return WIDEN(*this); }

    friend Own operator+(Own a, Own b) { return Own(float(a) + float(b)); }
    friend Own operator-(Own a, Own b) { return Own(float(a) - float(b)); }
    friend Own operator*(Own a, Own b) { return Own(float(a) * float(b)); }
    friend Own operator/(Own a, Own b) { return Own(float(a) / float(b)); }
    friend Own operator-(Own a) { return Own(-float(a)); }
    friend Own& operator+=(Own& a, Own b) { return a = a + b; }
    friend Own& operator*=(Own& a, Own b) { return a = a * b; }
    friend bool operator==(Own a, Own b) { return float(a) == float(b); }
    friend bool operator!=(Own a, Own b) { return float(a) != float(b); }
    friend bool operator<(Own a, Own b) { return float(a) < float(b); }
    friend bool operator<=(Own a, Own b) { return float(a) <= float(b); }
    friend bool operator>(Own a, Own b) { return float(a) > float(b); }
    friend bool operator>=(Own a, Own b) { return float(a) >= float(b); }
    friend bool __hisnan(Own a) { return std::isnan(float(a)); }
    friend Own hsqrt(Own a) { return Own(std::sqrt(float(a))); }
    friend Own hcos(Own a) { return Own(std::cos(float(a))); }
    friend Own hsin(Own a) { return Own(std::sin(float(a))); }
    friend Own hlog(Own a) { return Own(std::log(float(a))); }
    friend Own hexp(Own a) { return Own(std::exp(float(a))); }
    friend Own __habs(Own a) { return Own(std::fabs(float(a))); }
    friend Own __hmax_nan(Own a, Own b) { return __hisnan(a) ? a : __hisnan(b) ? b : Own(std::fmax(float(a), float(b))); }
    friend Own __hmin_nan(Own a, Own b) { return __hisnan(a) ? a : __hisnan(b) ? b : Own(std::fmin(float(a), float(b))); }
};

}  // namespace emulator

struct __half : emulator::Number<__half, emulator::Half, __float2half_rn, __half2float> {
    using Number::Number;
};
struct __nv_bfloat16 : emulator::Number<__nv_bfloat16, emulator::Bfloat16, __float2bfloat16_rn, __bfloat162float> {
    using Number::Number;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
using half = __half;
struct half2 {
    half x, y;
};
inline half __low2half(half2 v) { return v.x; }
inline half __high2half(half2 v) { return v.y; }
inline float __low2float(half2 v) { return v.x; }
inline float __high2float(half2 v) { return v.y; }
inline half2 make_half2(half x, half y) { return {x, y}; }
inline __half __float2half(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x + b.x, a.y + b.y}; }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x * b.x, a.y * b.y}; }

struct __nv_fp8_e4m3 {
    uint8_t __x;
    __nv_fp8_e4m3() = default;
    template <class T> explicit __nv_fp8_e4m3(T) { emulator::refuse("FP8", 0); }
};
enum { __NV_E4M3 };
inline __half __nv_cvt_fp8_to_halfraw(uint8_t, int) { emulator::refuse("FP8", 0); }

struct float2 {
    float x, y;
};
struct int2 {
    int x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float2 __half22float2(half2 v) { return {v.x, v.y}; }

inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }

// Products of blocks, which no caller uses.
inline int __dp4a(int, int, int) { emulator::refuse("a product of bytes", 0); }
inline int __vsubss4(int, int) { emulator::refuse("a difference of bytes", 0); }

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float normcdff(float x) { return 0.5f * std::erfc(-x * 0.70710678f); }
inline double normcdf(double x) { return 0.5 * std::erfc(-x * 0.7071067811865476); }
using std::isnan;
using std::signbit;

template <class To, class From> To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(static_cast<void*>(&to), static_cast<const void*>(&from), sizeof(to));
    return to;
}
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short x) { return emulator::Half{x}; }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return bits_as<double>(x); }

// Fibers do not run at the same time, so an atomic operation is a plain one.
template <class T> T atomicCAS(T* address, T compare, T value) {
    const T old = *address;
    if (old == compare) *address = value;
    return old;
}
template <class T, class V> T atomicMax(T* address, V value) {
    const T old = *address;
    if (old < static_cast<T>(value)) *address = value;
    return old;
}
template <class T, class V> T atomicMin(T* address, V value) {
    const T old = *address;
    if (static_cast<T>(value) < old) *address = value;
    return old;
}

namespace emulator {

// A kernel with ordinary arguments; the launch passes each in a separate 8 bytes.
struct Signature {
    const char* name;
    const unsigned char* sizes;
    size_t count;
    const Signature* next;
};
extern const Signature* signatures;

template <class T> T argument(const uint64_t* arguments, size_t i) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    T value;
    std::memcpy(static_cast<void*>(&value), arguments + i, sizeof(T));
    return value;
}

template <auto KERNEL> struct Kernel;
template <class... Args, void (*KERNEL)(Args...)> struct Kernel<KERNEL> {
    static constexpr unsigned char SIZES[] = {sizeof(Args)...};
    Entry entry;
    Signature signature;

    template <size_t... I> static void call(const uint64_t* arguments, std::index_sequence<I...>) {
        KERNEL(argument<Args>(arguments, I)...);
    }
    static void run(const void* arguments) {
        call(static_cast<const uint64_t*>(arguments), std::index_sequence_for<Args...>());
    }
    explicit Kernel(const char* name)
        : entry(name, 0, sizeof...(Args) * sizeof(uint64_t), run), signature{name, SIZES, sizeof...(Args), signatures} {
        signatures = &signature;
    }
};

}  // namespace emulator

#define CANDLE_KERNEL(name) static const emulator::Kernel<name> entry_##name(#name);
