// What stands between the matrix products of a lean layer, each in one pass over memory.
//
// Matrices are row-major and dense. Every row is computed by itself, in an order that
// depends on its width alone, so that a row's bits do not depend on how many there are.
// Compiled for the machine it runs on, by compiled_glue.py; never with -ffast-math,
// which would fold the rounding in exponential() away.

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kParallel = 12000;  // elements from which threads cost less than they save

struct bf16 {
  uint16_t bits;
};

inline float up(float x) { return x; }

inline float up(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

template <class T>
inline T down(float x);

template <>
inline float down<float>(float x) {
  return x;
}

template <>
inline bf16 down<bf16>(float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return bf16{static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded)};
}

// exp, within two units in the last place (the polynomial of Cephes' expf), and infinity
// from 88.4 on.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 89.0f ? 89.0f : x;
  float n = x * 1.44269504f + 12582912.0f;  // rounds to an integer, kept in the low bits
  uint32_t power;
  std::memcpy(&power, &n, sizeof power);
  n -= 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t bits = (power << 23) + 0x3f800000u;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

// What is done to one row is compiled once, not into each of the loops below: the two
// copies might round differently, and the number of rows would show.
#define ONE_ROW template <class T> __attribute__((noinline, noclone)) void

template <class Row>
inline void each_row(int64_t rows, int64_t width, Row row) {
  if (rows == 1 || rows * width < kParallel) {
    for (int64_t i = 0; i < rows; ++i) row(i);
    return;
  }
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; ++i) row(i);
}

// x += more
ONE_ROW add_row(int64_t width, T* x, const T* more) {
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) x[j] = down<T>(up(x[j]) + up(more[j]));
}

template <class T>
void add(int64_t rows, int64_t width, T* x, const T* more) {
  each_row(rows, width,
           [=](int64_t i) { add_row(width, x + i * width, more + i * width); });
}

// out = weight * (x / rms(x)), rounded where transformers' LlamaRMSNorm rounds
ONE_ROW norm_row(int64_t width, const T* x, const T* weight, float eps, T* out) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t j = 0; j < width; ++j) squares += up(x[j]) * up(x[j]);
  const float scale = 1.0f / __builtin_sqrtf(squares / width + eps);
#pragma omp simd
  for (int64_t j = 0; j < width; ++j)
    out[j] = down<T>(up(down<T>(up(x[j]) * scale)) * up(weight[j]));
}

template <class T>
void norm(int64_t rows, int64_t width, const T* x, const T* weight, float eps, T* out) {
  each_row(rows, width, [=](int64_t i) {
    norm_row(width, x + i * width, weight, eps, out + i * width);
  });
}

// sum = x + more; out = norm(sum)
ONE_ROW sum_row(int64_t width, const T* x, const T* more, T* sum) {
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) sum[j] = down<T>(up(x[j]) + up(more[j]));
}

template <class T>
void add_norm(int64_t rows, int64_t width, const T* x, const T* more, const T* weight,
              float eps, T* sum, T* out) {
  each_row(rows, width, [=](int64_t i) {
    sum_row(width, x + i * width, more + i * width, sum + i * width);
    norm_row(width, sum + i * width, weight, eps, out + i * width);
  });
}

// Rotary positions on the first `turning` of `heads` heads; the others are copied.
// `out` may be `in`.
ONE_ROW turn_row(int64_t turning, int64_t heads, int64_t dim, const T* cos, const T* sin,
                 const T* in, T* out) {
  const int64_t half = dim / 2;
  for (int64_t head = 0; head < turning; ++head, in += dim, out += dim) {
#pragma omp simd
    for (int64_t j = 0; j < half; ++j) {
      const float left = up(in[j]), right = up(in[j + half]);
      out[j] = down<T>(left * up(cos[j]) - right * up(sin[j]));
      out[j + half] = down<T>(right * up(cos[j + half]) + left * up(sin[j + half]));
    }
  }
  if (in != out) std::memcpy(out, in, (heads - turning) * dim * sizeof(T));
}

template <class T>
void turn(int64_t rows, int64_t turning, int64_t heads, int64_t dim, const T* cos,
          const T* sin, const T* in, T* out) {
  const int64_t width = heads * dim;
  each_row(rows, width, [=](int64_t i) {
    turn_row(turning, heads, dim, cos + i * dim, sin + i * dim, in + i * width,
             out + i * width);
  });
}

// out = silu(gate) * up, of rows that are gate and up side by side
ONE_ROW gate_row(int64_t width, const T* both, T* out) {
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) {
    const float x = up(both[j]);
    out[j] = down<T>(x / (1.0f + exponential(-x)) * up(both[width + j]));
  }
}

template <class T>
void gate(int64_t rows, int64_t width, const T* both, T* out) {
  each_row(rows, 2 * width, [=](int64_t i) {
    gate_row(width, both + 2 * i * width, out + i * width);
  });
}

}  // namespace

#define EXPORTED(T, NAME)                                                             \
  extern "C" void add_##NAME(int64_t rows, int64_t width, T* x, const T* more) {      \
    add(rows, width, x, more);                                                        \
  }                                                                                   \
  extern "C" void norm_##NAME(int64_t rows, int64_t width, const T* x,                \
                              const T* weight, float eps, T* out) {                   \
    norm(rows, width, x, weight, eps, out);                                           \
  }                                                                                   \
  extern "C" void add_norm_##NAME(int64_t rows, int64_t width, const T* x,            \
                                  const T* more, const T* weight, float eps, T* sum,  \
                                  T* out) {                                           \
    add_norm(rows, width, x, more, weight, eps, sum, out);                            \
  }                                                                                   \
  extern "C" void turn_##NAME(int64_t rows, int64_t turning, int64_t heads,           \
                              int64_t dim, const T* cos, const T* sin, const T* in,   \
                              T* out) {                                               \
    turn(rows, turning, heads, dim, cos, sin, in, out);                               \
  }                                                                                   \
  extern "C" void gate_##NAME(int64_t rows, int64_t width, const T* both, T* out) {   \
    gate(rows, width, both, out);                                                     \
  }

EXPORTED(bf16, bf16)
EXPORTED(float, float)
