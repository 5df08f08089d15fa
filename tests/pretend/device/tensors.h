// What is no kernel of the CPU's: new tensors, copies between host and devices, storages; and the registrations.
#pragma once
#include <ATen/EmptyTensor.h>

#include "kernels.h"
#include "substitutes.h"

namespace pretend {
inline int index_of(std::optional<Device> d) { return d ? index_or_current(*d) : current_device; }

inline at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                                std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  auto type = dtype.value_or(typeMetaToScalarType(get_default_dtype()));
  check_dtype(type);
  const size_t n = at::detail::computeStorageNbytes(size, stride, elementSize(type));
  Storage storage(Storage::use_byte_size_t(), n, PretendAllocator::allocate_on(index_of(device), n), &pretend_allocator, true);
  auto out = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::PrivateUse1), scalarTypeToTypeMeta(type));
  out.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return out;
}
inline at::Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout> layout, std::optional<Device> device,
                        std::optional<bool> pin, std::optional<MemoryFormat> format) {
  std::vector<int64_t> stride(size.size());
  auto f = format.value_or(MemoryFormat::Contiguous);
  if (f == MemoryFormat::ChannelsLast) {
    stride = get_channels_last_strides_2d(size);
  } else if (f == MemoryFormat::ChannelsLast3d) {
    stride = get_channels_last_strides_3d(size);
  } else {
    int64_t n = 1;
    for (int64_t i = (int64_t)size.size() - 1; i >= 0; --i) {
      stride[i] = n;
      n *= std::max<int64_t>(size[i], 1);
    }
  }
  return empty_strided(size, stride, dtype, layout, device, pin);
}

// ---------------------------------------------------------------- copies
inline at::Tensor over_pinned(const at::Tensor& t) {  // without hold on the tensor: its bytes are kept by their count
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().pinned_memory(false));
}
inline void poison(const at::Tensor& t) {
  if (t.scalar_type() == kBool) t.fill_(true);
  else if (t.is_contiguous()) std::memset(t.data_ptr(), 0xFF, t.nbytes());  // NaN, or -1
  else if (t.is_floating_point() || t.is_complex()) t.fill_(std::nan(""));
  else t.fill_(at::isIntegralType(t.scalar_type(), false) && t.scalar_type() == kByte ? 255 : -1);
}
inline void copy_within(const at::Tensor& from, const at::Tensor& to) {
  Entry entry({{from, false}, {to, true}});
  auto& s = stream_of(from.device().index());
  judge(s, {{from, false}}, "a copy");
  if (from.device() == to.device()) {
    touch(s, to, true, "a copy");
  } else {  // as CUDA's: both devices' current streams wait for each other
    auto& other = stream_of(to.device().index());
    tick(other);
    join(s.clock, other.clock);
    make_copies_to_device(s.clock);
    touch(s, to, true, "a copy");
    join(other.clock, s.clock);
  }
  counters.kernels++;
  entry.lock.unlock();
  alias_alone(to).copy_(alias_alone(from));
}
inline void copy_from_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Entry entry({{to, true}});
  auto& s = stream_of(to.device().index());
  auto pinned = find_pinned(from.storage().data());
  const bool is_late = non_blocking && pinned != pinned_blocks().end();
  if (!non_blocking) count_wait(Wait::COPY_FROM_HOST);
  tick(s);
  touch(s, to, true, "a copy");
  counters.copies_from_host++;
  if (is_late) {
    counters.copies_late++;
    pinned->second.copies++;
    copies().push_back({s.number, at_stream(s.clock, s.number), false, over_pinned(from), alias_alone(to), pinned->first});
    return;
  }
  make_copies_to_device(s.clock);
  alias_alone(to).copy_(from);
  entry.run.unlock();
  if (!non_blocking) wait_uncounted(entry.lock, Clock(s.clock));
}
inline void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Entry entry({{from, false}});
  auto& s = stream_of(from.device().index());
  auto pinned = find_pinned(to.storage().data());
  const bool is_late = non_blocking && pinned != pinned_blocks().end();
  if (!is_late) count_wait(Wait::COPY_TO_HOST);
  judge(s, {{from, false}}, "a copy");
  counters.copies_to_host++;
  if (is_late) {
    counters.copies_late++;
    pinned->second.copies++;
    auto shot = alias_alone(from).to(to.scalar_type(), false, true);
    auto host = over_pinned(to);
    poison(host);
    copies().push_back({s.number, at_stream(s.clock, s.number), true, host, shot, pinned->first});
    return;
  }
  auto upto = s.clock;
  entry.run.unlock();
  wait_uncounted(entry.lock, upto);
  entry.lock.unlock();
  entry.run.lock();
  to.copy_(alias_alone(from));
}
inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  auto from = self.sizes() == dst.sizes() ? self : self.expand_as(dst);
  if (!dst.numel()) return dst;
  if (self.device().type() != kPretend) copy_from_host(from, dst, non_blocking);
  else if (dst.device().type() != kPretend) copy_to_host(from, dst, non_blocking);
  else copy_within(from, dst);
  return dst;
}
inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (self.sizes() != dst.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

// ---------------------------------------------------------------- storages
inline at::Tensor& set_storage(at::Tensor& t, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size() && !size.empty()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return t;
}
inline at::Tensor& set_whole_storage(at::Tensor& t, Storage source) {
  const auto n = (int64_t)(source.nbytes() / t.dtype().itemsize());
  return set_storage(t, std::move(source), 0, {n}, {});
}
inline at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& source) {
  return set_storage(t, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline void record_stream(at::Tensor& t, Stream s) { pretend_allocator.recordStream(t.storage().data_ptr(), s); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  // Where torch has one way for any device, made of other kernels, and a kernel of the CPU's (layer norm, group
  // norm, ...), ours is the CPU's: else the last bits differ.
  for (const auto& name : Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = Dispatcher::singleton().findOp(name);
    if (!op || op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) continue;
    auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    const bool is_substitute = name.overload_name.empty() && substitutes().count(name.name);
    const bool has_general = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
                             op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    const bool is_one_kernel = name.name.rfind("aten::_foreach_", 0) == 0;  // on a device; the CPU has a loop
    if (is_substitute || (has_general && (is_one_kernel || op->hasKernelForDispatchKey(DispatchKey::CPU))))
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}
}  // namespace pretend
