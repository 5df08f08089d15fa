// Autocast with CUDA's lists of operators, boxed: one function for each rule instead of one for each operator.
#pragma once
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "kernels.h"

namespace pretend {
using namespace at::autocast;
enum class Rule { LOWER, FULL, FULL_SET_DTYPE, PROMOTE };

inline bool is_eligible(const at::Tensor& t) { return t.defined() && is_autocast_eligible(t, kPretend) && t.scalar_type() != kDouble; }

template <typename Each>
void each_tensor(Stack& stack, size_t first, const Each& each) {
  for (size_t i = first; i < stack.size(); ++i) {
    IValue& v = stack[i];
    if (v.isTensor()) {
      v = each(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& t : v.toTensorVector()) list.push_back(each(t));
      v = list;
    }
  }
}
template <Rule rule>
void autocast(const OperatorHandle& op, DispatchKeySet, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(DispatchKeySet(DispatchKey::AutocastPrivateUse1));
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  auto to = rule == Rule::LOWER ? get_lower_precision_fp_from_device_type(kPretend) : kFloat;
  if constexpr (rule == Rule::FULL_SET_DTYPE) {  // the sum is float32, and so is the result; the input stays
    const auto& input = (*stack)[first];
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].name() == "dtype" && (*stack)[first + i].isNone() && input.isTensor() && is_eligible(input.toTensor()))
        (*stack)[first + i] = kFloat;
  } else {
    if constexpr (rule == Rule::PROMOTE) {
      to = get_lower_precision_fp_from_device_type(kPretend);
      each_tensor(*stack, first, [&](const at::Tensor& t) {
        if (is_eligible(t) && t.scalar_type() == kFloat) to = kFloat;
        return t;
      });
    }
    each_tensor(*stack, first, [&](const at::Tensor& t) { return cached_cast(to, t, kPretend); });
  }
  op.callBoxed(stack);
}

#define PRETEND_OP(op, ...) #op __VA_OPT__("." #__VA_ARGS__),
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (auto* name : {AT_FORALL_LOWER_PRECISION_FP(PRETEND_OP)}) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<Rule::LOWER>>());
  for (auto* name : {AT_FORALL_FP32(PRETEND_OP) "norm.Scalar", "norm.ScalarOpt_dim"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<Rule::FULL>>());
  for (auto* name : {AT_FORALL_FP32_SET_OPT_DTYPE(PRETEND_OP)}) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<Rule::FULL_SET_DTYPE>>());
  for (auto* name : {AT_FORALL_PROMOTE(PRETEND_OP) "stack", "cat"}) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<Rule::PROMOTE>>());
}
#undef PRETEND_OP
}  // namespace pretend
