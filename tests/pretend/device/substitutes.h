// Kernels whose names torch asks of devices only, never of the CPU: made of the CPU's kernels, on aliases.
// Each counts as one kernel, as on a real device.
#pragma once
#include <ATen/native/transformers/attention.h>

#include "kernels.h"

namespace pretend {
using OptionalTensor = std::optional<at::Tensor>;

template <typename... Results>
void finish(Stack& stack, size_t first, Results&&... results) {
  stack.resize(first);
  (stack.emplace_back(std::forward<Results>(results)), ...);
}
inline OptionalTensor optional_tensor(const IValue& v) {
  if (!v.isTensor() || !v.toTensor().defined()) return std::nullopt;
  return v.toTensor();
}

inline const OperatorHandle& named(const char* name) {
  static auto* known = new std::map<std::string, OperatorHandle>();
  auto it = known->find(name);
  if (it == known->end()) it = known->emplace(name, Dispatcher::singleton().findSchemaOrThrow(name, "")).first;
  return it->second;
}
inline void convolution(Stack& stack, size_t) { named("aten::convolution").redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack); }
inline void convolution_backward(Stack& stack, size_t first) {
  const auto& weight = stack[first + 2].toTensor();
  const bool is_transposed = stack[first + 6].toBool();
  const int64_t groups = stack[first + 8].toInt();
  std::vector<int64_t> bias{is_transposed ? weight.size(1) * groups : weight.size(0)};
  stack.insert(stack.begin() + (int64_t)first + 3, IValue(bias));
  named("aten::convolution_backward").redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
}

inline void native_dropout(Stack& stack, size_t first) {  // (input, p, train?) -> (output, mask)
  auto input = stack[first].toTensor();
  const double p = stack[first + 1].toDouble();
  if (!input.numel() || !stack[first + 2].toOptional<bool>().value_or(true))
    return finish(stack, first, input.clone(), at::ones_like(input, input.options().dtype(kBool)));
  auto generator = inner_generator(default_generator(kernel_place.device));
  auto noise = at::empty_like(input, at::MemoryFormat::Contiguous).bernoulli_(1 - p, generator);
  auto mask = noise.to(kBool);
  if (p < 1) noise.div_(1 - p);
  finish(stack, first, input * noise, mask);
}
inline void native_dropout_backward(Stack& stack, size_t first) {  // (grad, mask, scale)
  finish(stack, first, stack[first].toTensor() * (stack[first + 1].toTensor().to(stack[first].toTensor().scalar_type()) * stack[first + 2].toDouble()));
}

// (input gates, hidden gates, cx, input bias?, hidden bias?) -> (hy, cy, workspace)
inline void lstm_cell(Stack& stack, size_t first) {
  auto gates = stack[first].toTensor() + stack[first + 1].toTensor();
  auto cx = stack[first + 2].toTensor();
  if (auto bias = optional_tensor(stack[first + 3])) gates = gates + *bias + stack[first + 4].toTensor();
  auto g = gates.chunk(4, 1);
  auto i = g[0].sigmoid(), f = g[1].sigmoid(), c = g[2].tanh(), o = g[3].sigmoid();
  auto cy = f * cx + i * c;
  finish(stack, first, o * cy.tanh(), cy, at::cat({i, f, c, o}, 1));
}
// (grad hy?, grad cy?, cx, cy, workspace, has bias) -> (grad gates, grad cx, grad bias)
inline void lstm_cell_backward(Stack& stack, size_t first) {
  auto grad_hy = optional_tensor(stack[first]), grad_cy = optional_tensor(stack[first + 1]);
  auto cx = stack[first + 2].toTensor(), cy = stack[first + 3].toTensor();
  auto w = stack[first + 4].toTensor().chunk(4, 1);
  auto &i = w[0], &f = w[1], &c = w[2], &o = w[3];
  auto t = cy.tanh();
  auto gc = grad_cy ? *grad_cy : at::zeros_like(cy);
  auto go = at::zeros_like(o);
  if (grad_hy) {
    gc = gc + *grad_hy * o * (1 - t * t);
    go = *grad_hy * t * o * (1 - o);
  }
  auto gates = at::cat({gc * c * i * (1 - i), gc * cx * f * (1 - f), gc * i * (1 - c * c), go}, 1);
  const bool has_bias = stack[first + 5].toBool();
  finish(stack, first, gates, gc * f, has_bias ? gates.sum(0) : at::Tensor());
}
// (input gates, hidden gates, hx, input bias?, hidden bias?) -> (hy, workspace)
inline void gru_cell(Stack& stack, size_t first) {
  auto in = stack[first].toTensor(), hidden = stack[first + 1].toTensor(), hx = stack[first + 2].toTensor();
  if (auto bias = optional_tensor(stack[first + 3])) {
    in = in + *bias;
    hidden = hidden + stack[first + 4].toTensor();
  }
  auto a = in.chunk(3, 1), b = hidden.chunk(3, 1);
  auto reset = (a[0] + b[0]).sigmoid(), update = (a[1] + b[1]).sigmoid(), fresh = (a[2] + reset * b[2]).tanh();
  finish(stack, first, (hx - fresh) * update + fresh, at::cat({reset, update, fresh, hx, b[2]}, 1));
}
// (grad hy, workspace, has bias) -> (grad input gates, grad hidden gates, grad hx, grad input bias, grad hidden bias)
inline void gru_cell_backward(Stack& stack, size_t first) {
  auto grad = stack[first].toTensor();
  auto w = stack[first + 1].toTensor().chunk(5, 1);
  auto &reset = w[0], &update = w[1], &fresh = w[2], &hx = w[3], &hidden = w[4];
  auto fresh_in = grad * (1 - update) * (1 - fresh * fresh);
  auto reset_in = fresh_in * hidden * reset * (1 - reset);
  auto update_in = grad * (hx - fresh) * update * (1 - update);
  auto in = at::cat({reset_in, update_in, fresh_in}, 1), hid = at::cat({reset_in, update_in, fresh_in * reset}, 1);
  const bool has_bias = stack[first + 2].toBool();
  finish(stack, first, in, hid, grad * update, has_bias ? in.sum(0) : at::Tensor(), has_bias ? hid.sum(0) : at::Tensor());
}
// The kernel of attention is the one that the CPU would choose.
inline int64_t choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask, double p,
                                bool is_causal, std::optional<double> scale, bool enable_gqa) {
  Twins twins;
  auto cpu = [&](const at::Tensor& t) { return alias_of(t, twins).requires_grad_(t.requires_grad()); };
  return at::_fused_sdp_choice(cpu(q), cpu(k), cpu(v), mask && mask->device().type() == kPretend ? OptionalTensor(cpu(*mask)) : mask, p,
                               is_causal, scale, enable_gqa);
}

inline const bool are_substitutes_known = [] {
  substitutes() = {{"aten::convolution_overrideable", &convolution},
                   {"aten::convolution_backward_overrideable", &convolution_backward},
                   {"aten::native_dropout", &native_dropout},
                   {"aten::native_dropout_backward", &native_dropout_backward},
                   {"aten::_thnn_fused_lstm_cell", &lstm_cell},
                   {"aten::_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward},
                   {"aten::_thnn_fused_gru_cell", &gru_cell},
                   {"aten::_thnn_fused_gru_cell_backward", &gru_cell_backward}};
  return true;
}();
}  // namespace pretend

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &pretend::choose_attention)
}
