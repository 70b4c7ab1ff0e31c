"""The source of the kernel of :mod:`.gated_delta`."""

from __future__ import annotations

#: What kernels of delta rules do with four numbers of a row of the state.
HEADER = """
__device__ __forceinline__ void multiply(float4& a, const float4 by) {
  a.x *= by.x;
  a.y *= by.y;
  a.z *= by.z;
  a.w *= by.w;
}
__device__ __forceinline__ void add_product(
    float4& sum, const float4 a, const float4 b) {
  sum.x = fmaf(a.x, b.x, sum.x);
  sum.y = fmaf(a.y, b.y, sum.y);
  sum.z = fmaf(a.z, b.z, sum.z);
  sum.w = fmaf(a.w, b.w, sum.w);
}
__device__ __forceinline__ float4 four_of(float a) { return make_float4(a, a, a, a); }
__device__ __forceinline__ float sum_of_lanes(float sum, int lanes) {
  #pragma unroll
  for (int i = 1; i < lanes; i *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
  return sum;
}
__device__ __forceinline__ float sum_of_row(const float4 sum, int lanes) {
  return sum_of_lanes((sum.x + sum.y) + (sum.z + sum.w), lanes);
}
"""
# The inputs of all tokens are one sequence: a window, kept tokens, new tokens. Products
# that are added are written as fmaf. The compiler could otherwise round other products
# in each kernel.
SOURCE = """
  constexpr int FOURS = Dk / 4 / LANES, WINDOW = K - 1;
  constexpr int THREADS = Dv / ROWS * LANES, WARPS = THREADS / 32;
  constexpr int WIDTH = 2 * Dk + Dv;  // channels of a head
  constexpr int STEP = GROUPED ? 2 * Dk + 2 * R * Dv : Dk;
  constexpr int V_STEP = GROUPED ? STEP : R * Dv;
  constexpr int K_AT = GROUPED ? Dk : HK * Dk, V_AT = 2 * K_AT;
  constexpr int Z_AT = GROUPED ? 2 * Dk + R * Dv : 0;
  constexpr int A_AT = GROUPED ? R : 0, B_STEP = GROUPED ? 2 * R : R;
  constexpr int HV = HK * R, CHANNELS = 2 * HK * Dk + HV * Dv;
  const int S = x_shape[1];
  const int head = blockIdx.x % HV, group = head / R, of = head % R;
  const size_t row = blockIdx.x / HV;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int dv = threadIdx.x / LANES * ROWS, part = threadIdx.x % LANES;

  auto rounded = [](float value) { return static_cast<float>(static_cast<T>(value)); };
  auto sigmoid = [](float value) { return 1.0f / (1.0f + expf(-value)); };

  @KEPT@
  @OWN@
  const int total = kept + own_tokens;

  // This thread's numbers of its rows of the state: each LANES-th four.
  float4 held[ROWS][FOURS];
  const size_t own = ((row * HV + head) * Dv + dv) * Dk / 4 + part;
  #pragma unroll
  for (int r = 0; r < ROWS; ++r)
    #pragma unroll
    for (int j = 0; j < FOURS; ++j)
      held[r][j] = reinterpret_cast<const float4*>(state)[own + r * Dk / 4 + j * LANES];
  auto write = [&](float* into) {
    #pragma unroll
    for (int r = 0; r < ROWS; ++r)
      #pragma unroll
      for (int j = 0; j < FOURS; ++j)
        reinterpret_cast<float4*>(into)[own + r * Dk / 4 + j * LANES] = held[r][j];
  };

  __shared__ float4 queries[TILE][Dk / 4], keys[TILE][Dk / 4];
  __shared__ float values[TILE][Dv];  // then what was found for them
  __shared__ float decays[TILE], betas[TILE];

  for (int begin = 0; begin < total; begin += TILE) {
    const int count = min(TILE, total - begin);
    __syncthreads();

    // The convolution, of this head's channels. A few inputs are asked for at once.
    for (int c = threadIdx.x; c < WIDTH; c += THREADS) {
      const int which = c < Dk ? 0 : c < 2 * Dk ? 1 : 2, d = c - which * Dk;
      const int channel =
          which == 2 ? 2 * HK * Dk + head * Dv + d : (which * HK + group) * Dk + d;
      const int in_x = which == 2 ? V_AT + group * V_STEP + of * Dv + d
                                  : which * K_AT + group * STEP + d;
      const T* old = taped + row * taped_strides[0] + channel * taped_strides[2];
      const T* added = x + row * x_strides[0] + in_x * x_strides[2];
      auto input = [&](int at) {  // of the row's sequence
        const int from = at - kept - WINDOW;
        return from < 0 ? old[at * taped_strides[1]] : added[from * x_strides[1]];
      };
      const bool writes = which == 2 || of == 0;
      T* down = joined + row * (WINDOW + S) * CHANNELS + channel;
      float* into = reinterpret_cast<float*>(which ? keys[0] : queries[0]) + d;
      if (which == 2) into = values[0] + d;
      float weight[K];
      #pragma unroll
      for (int j = 0; j < K; ++j)
        weight[j] = static_cast<float>(
            conv[channel * conv_strides[0] + j * conv_strides[1]]);
      T seen[WINDOW + FEW];
      #pragma unroll
      for (int j = 0; j < WINDOW; ++j) seen[j] = input(begin + j);
      #pragma unroll 1
      for (int first = 0; first < count; first += FEW) {
        #pragma unroll
        for (int t = 0; t < FEW; ++t)
          if (first + t < count) seen[WINDOW + t] = input(begin + first + t + WINDOW);
        #pragma unroll
        for (int t = 0; t < FEW; ++t) {
          if (first + t >= count) break;
          const int token = begin + first + t - kept;
          float sum = 0.0f;
          #pragma unroll
          for (int j = 0; j < K; ++j) {
            sum = fmaf(static_cast<float>(seen[t + j]), weight[j], sum);
            // Each input is written down once.
            if (writes && (token > 0 ? j == WINDOW : token == 0))
              down[(token + j) * CHANNELS] = seen[t + j];
          }
          sum = rounded(sum);
          into[(first + t) * (which == 2 ? Dv : Dk)] =
              rounded(sum * rounded(sigmoid(sum)));
        }
        #pragma unroll
        for (int j = 0; j < WINDOW; ++j) seen[j] = seen[FEW + j];
      }
    }

    if (threadIdx.x < count) {
      const int at = begin + threadIdx.x;
      float decay = 0.0f, beta = 0.0f;
      if (at < kept) {
        @GATES@
      } else {
        const size_t token = at - kept;
        const int in_a = A_AT + group * B_STEP + of, in_b = group * B_STEP + of;
        const float by = static_cast<float>(
            a[row * a_strides[0] + token * a_strides[1] + in_a * a_strides[2]]);
        const float for_beta = static_cast<float>(
            b[row * b_strides[0] + token * b_strides[1] + in_b * b_strides[2]]);
        auto in_type = [](float value) {
          return static_cast<float>(static_cast<G>(value));
        };
        const float step =
            in_type(by + static_cast<float>(dt_bias[head * dt_bias_strides[0]]));
        const float soft =
            in_type(fmaxf(step, 0.0f) + log1pf(expf(-fabsf(step))));
        const float rate =
            expf(static_cast<float>(a_log[head * a_log_strides[0]]));
        decay = expf(-(rate * soft));
        beta = rounded(sigmoid(for_beta));
        float* note = gates + ((row * S + token) * HV + head) * 2;
        note[0] = decay;
        note[1] = beta;
      }
      decays[threadIdx.x] = decay;
      betas[threadIdx.x] = beta;
    }
    __syncthreads();

    for (int i = warp; i < 2 * count; i += WARPS) {
      float* some = reinterpret_cast<float*>(i < count ? queries[i] : keys[i - count]);
      float sum = 0.0f;
      for (int d = lane; d < Dk; d += 32) sum = fmaf(some[d], some[d], sum);
      const float size = sqrtf(fmaf(sum_of_lanes(sum, 32), 1.0f / Dk, 1e-6f / Dk));
      const float scale =
          rounded(i < count ? 1.0f / Dk : 1.0f / sqrtf(static_cast<float>(Dk)));
      for (int d = lane; d < Dk; d += 32)
        some[d] = rounded(rounded(some[d] / size) * scale);
    }
    __syncthreads();

    // The delta rule: every row of the state for itself.
    for (int t = 0; t < count; ++t) {
      @MIDDLE@
      float4 key[FOURS];
      #pragma unroll
      for (int j = 0; j < FOURS; ++j) key[j] = keys[t][j * LANES + part];
      #pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float4 sum = four_of(0.0f);
        #pragma unroll
        for (int j = 0; j < FOURS; ++j) {
          multiply(held[r][j], four_of(decays[t]));
          add_product(sum, held[r][j], key[j]);
        }
        const float known = sum_of_row(sum, LANES);
        const float4 delta = four_of((values[t][dv + r] - known) * betas[t]);
        #pragma unroll
        for (int j = 0; j < FOURS; ++j) add_product(held[r][j], key[j], delta);
      }
      if (begin + t < kept) continue;
      float4 sums[ROWS];
      #pragma unroll
      for (int r = 0; r < ROWS; ++r) sums[r] = four_of(0.0f);
      #pragma unroll
      for (int j = 0; j < FOURS; ++j) {
        const float4 query = queries[t][j * LANES + part];
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) add_product(sums[r], held[r][j], query);
      }
      #pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float product = sum_of_row(sums[r], LANES);
        if (part == 0) values[t][dv + r] = rounded(product);
      }
    }
    __syncthreads();

    // The gated norm, of what is new.
    for (int i = warp; i < count; i += WARPS) {
      const int token = begin + i - kept;
      if (token < 0) continue;
      float sum = 0.0f;
      for (int d = lane; d < Dv; d += 32) sum = fmaf(values[i][d], values[i][d], sum);
      const float size =
          sqrtf(fmaf(sum_of_lanes(sum, 32), 1.0f / Dv, static_cast<float>(@EPS@)));
      for (int d = lane; d < Dv; d += 32) {
        const float normed = rounded(values[i][d] / size *
                                     static_cast<float>(norm[d * norm_strides[0]]));
        const int in_z = Z_AT + group * V_STEP + of * Dv + d;
        const float gate = static_cast<float>(
            z[row * z_strides[0] + token * z_strides[1] + in_z * z_strides[2]]);
        y[((row * S + token) * HV + head) * Dv + d] =
            static_cast<T>(gate * sigmoid(gate) * normed);
      }
    }
  }
  write(after);
  // Padding: outputs that are read as little, but must not be NaN.
  for (int i = own_tokens * Dv + threadIdx.x; i < S * Dv; i += THREADS)
    y[((row * S + i / Dv) * HV + head) * Dv + i % Dv] = static_cast<T>(0.0f);
"""
# How many of its tokens are a row's own; the rest is padding.
ALL = "const int own_tokens = S;"
OWN = "const int own_tokens = max(0, min(lengths[row * lengths_strides[0]], S));"
# For a previous round: how many of its tokens the row has kept, the gates of a kept
# token, and what is written after the last kept token.
KEPT = """
  const int last = taped_shape[1] - WINDOW;
  const int kept = max(0, min(kept_of[row * kept_of_strides[0]], last));
"""
NOTED = """
        const float* note = noted + ((row * last + at) * HV + head) * 2;
        decay = note[0];
        beta = note[1];
"""
MIDDLE = "if (begin + t == kept) write(middle);"
