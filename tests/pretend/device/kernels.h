// Kernels: the CPU's own, run at once on tensors of the CPU that show the device's memory by its second mapping.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <unordered_map>

#include "runtime.h"

namespace pretend {
using torch::jit::Stack;

// Kernels of all host threads run one after another, as on a stream.
inline std::recursive_mutex& execution() {
  static auto* mutex = new std::recursive_mutex();
  return *mutex;
}
inline void check_dtype(ScalarType dtype) {
  TORCH_CHECK_TYPE(!refuses_float64() || (dtype != kDouble && dtype != kComplexDouble), "Cannot make a tensor of ", dtype, " on ", upper_name(),
                   ": the device has no float64 (PRETEND_NO_FLOAT64). Please use float32 instead.");
}

// ---------------------------------------------------------------- aliases
using Twins = std::unordered_map<StorageImpl*, Storage>;  // the device's storage -> the CPU's over the same bytes

inline at::Tensor alias_of(const at::Tensor& t, Twins& twins) {
  auto* impl = t.unsafeGetTensorImpl();
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  auto it = twins.find(storage);
  if (it == twins.end()) {
    auto& memory = memory_of(t.device().index());
    char* face = (char*)storage->data_ptr().get();
    void* body = face ? memory.body + (face - memory.face) : nullptr;
    Storage twin(Storage::use_byte_size_t(), storage->nbytes(),
                 DataPtr(body, nullptr, &c10::detail::deleteNothing, Device(DeviceType::CPU)), GetCPUAllocator(), true);
    it = twins.emplace(storage, std::move(twin)).first;
  }
  auto out = at::detail::make_tensor<TensorImpl>(Storage(it->second), DispatchKeySet(DispatchKey::CPU), impl->dtype());
  auto* made = out.unsafeGetTensorImpl();
  made->set_storage_offset(impl->storage_offset());
  made->set_sizes_and_strides(impl->sizes(), impl->strides());
  if (impl->is_conj()) made->_set_conj(true);
  if (impl->is_neg()) made->_set_neg(true);
  if (impl->is_wrapped_number()) made->set_wrapped_number(true);
  return out;
}
inline at::Tensor alias_alone(const at::Tensor& t) {
  Twins twins;
  return alias_of(t, twins);
}
inline at::Tensor wrap(const at::Tensor& cpu, Storage storage) {
  check_dtype(cpu.scalar_type());
  auto out = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::PrivateUse1), cpu.dtype());
  auto* made = out.unsafeGetTensorImpl();
  made->set_storage_offset(cpu.storage_offset());
  made->set_sizes_and_strides(cpu.sizes(), cpu.strides());
  if (cpu.is_conj()) made->_set_conj(true);
  if (cpu.is_neg()) made->_set_neg(true);
  return out;
}
// Memory that a kernel took becomes a tensor's: by its other address. Other memory is copied to the device.
inline DataPtr to_device(DataPtr p, int device, size_t nbytes) {
  const Device where(kPretend, (DeviceIndex)device);
  auto& memory = memory_of(device);
  char* body = (char*)p.get();
  if (p.get_deleter() == &give_body && body >= memory.body && body < memory.body + memory.limit) {
    auto* block = block_at_body(body);
    p.release_context();
    return {memory.face + (body - memory.body), block, &give, where};
  }
  auto made = PretendAllocator::allocate_on(device, nbytes);
  if (body && nbytes) std::memcpy(body_of(made.get()), body, nbytes);
  return made;
}

// ---------------------------------------------------------------- accounts of one piece of work
struct Touch {
  at::Tensor tensor;
  bool writes;
};
inline Block* block_of(const at::Tensor& t) {
  return t.has_storage() ? find_block(t.device().index(), t.storage().data_ptr().get()) : nullptr;
}
// The bytes of its block between a tensor's first and last element.
inline std::pair<size_t, size_t> extent(const at::Tensor& t) {
  if (!t.numel()) return {0, 0};
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  const size_t item = t.dtype().itemsize(), first = (size_t)t.storage_offset() * item;
  return {first, first + (size_t)(last + 1) * item};
}
inline void touch(StreamState& s, const at::Tensor& t, bool writes, const std::string& op) {
  auto* block = block_of(t);
  if (!block || race_mode() == Races::OFF) return;
  auto [first, end] = extent(t);
  if (end <= first) return;
  if (!block->ghosts.empty()) judge_ghosts(block, s, op);
  touch_spans(block->spans, first, end, s, writes, op);
}
// Wait until no collective is at work on the tensors, then hold both locks.
struct Entry {
  std::unique_lock<std::recursive_mutex> run{execution(), std::defer_lock};
  Lock lock{accounts(), std::defer_lock};
  explicit Entry(const std::vector<Touch>& touches) {
    auto flies = [&] {
      return std::any_of(touches.begin(), touches.end(), [](auto& touch) {
        auto* block = block_of(touch.tensor);
        return block && (block->flying_writes || (touch.writes && block->flying_reads));
      });
    };
    while (true) {
      run.lock();
      lock.lock();
      if (flights().empty() || !flies()) return;
      run.unlock();
      landed().wait(lock);
      lock.unlock();
    }
  }
};
// A kernel of a stream begins: what it needs is there, and its accesses are judged. A race is judged first, for a
// kernel that did not wait for a collective must not be saved by the wait of the host.
inline void judge(StreamState& s, const std::vector<Touch>& touches, const std::string& op) {
  tick(s);
  for (auto& t : touches) touch(s, t.tensor, t.writes, op);
  make_copies_to_device(s.clock);
}

// ---------------------------------------------------------------- what is known of an operator
using Substitute = void (*)(Stack&, size_t first);
inline std::unordered_map<std::string, Substitute>& substitutes() {
  static auto* all = new std::unordered_map<std::string, Substitute>();
  return *all;
}
struct OpInfo {
  std::string name;
  std::vector<bool> writes;
  bool is_view = false, waits = false, takes_host_scalars = false, takes_host_tensors = false, draws_unnamed = false;
  int generator = -1;  // which argument
  Substitute substitute = nullptr;
};
inline const std::set<std::string> kHostTensorOps{
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put",
    "aten::_ctc_loss", "aten::_ctc_loss_backward", "aten::ctc_loss", "aten::_pack_padded_sequence", "aten::_pad_packed_sequence",
    "aten::_foreach_addcdiv", "aten::_foreach_addcdiv_", "aten::_foreach_addcmul", "aten::_foreach_addcmul_"};
// Element-wise kernels that do not say so (by torch's tag), and others that take numbers as tensors of the host.
inline const std::set<std::string> kHostScalarOps{
    "aten::fill_", "aten::masked_fill", "aten::masked_fill_", "aten::where", "aten::clamp", "aten::clamp_", "aten::lerp", "aten::lerp_",
    "aten::index_fill_", "aten::index_fill", "aten::result_type", "aten::can_cast"};
inline const std::set<std::string> kWaitingOps{
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::equal",
    "aten::is_nonzero", "aten::bincount", "aten::_local_scalar_dense", "aten::_ctc_loss"};

inline const OpInfo& info_of(const OperatorHandle& op) {
  static auto* known = new std::unordered_map<const FunctionSchema*, std::unique_ptr<OpInfo>>();
  Lock lock(accounts());
  auto& info = (*known)[&op.schema()];
  if (info) return *info;
  const auto& schema = op.schema();
  auto made = std::make_unique<OpInfo>();
  made->name = schema.name();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    made->writes.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    if (argument.name() == "generator" && *argument.type() == *OptionalType::create(GeneratorType::get())) made->generator = (int)i;
  }
  for (const auto& r : schema.returns()) made->is_view |= r.alias_info() && !r.alias_info()->isWrite();
  made->waits = kWaitingOps.count(made->name) > 0;
  made->takes_host_tensors = kHostTensorOps.count(made->name) > 0;
  made->takes_host_scalars = op.hasTag(at::Tag::pointwise) || kHostScalarOps.count(made->name) || made->name.rfind("aten::_foreach_", 0) == 0 ||
                             made->name.rfind("aten::_fused_", 0) == 0;
  if (!made->takes_host_scalars && made->name.size() > 1 && made->name.back() == '_') {
    auto plain = Dispatcher::singleton().findSchema({made->name.substr(0, made->name.size() - 1), schema.overload_name()});
    made->takes_host_scalars = plain && plain->hasTag(at::Tag::pointwise);
  }
  made->draws_unnamed = made->generator < 0 && op.hasTag(at::Tag::nondeterministic_seeded);
  auto it = substitutes().find(made->name);
  if (it != substitutes().end()) made->substitute = it->second;
  info = std::move(made);
  return *info;
}

// Kernels that draw and name no generator draw from the device's: the CPU's has its state meanwhile.
struct BorrowedGenerator {
  at::Generator mine, cpu = at::detail::getDefaultCPUGenerator();
  at::Tensor state;
  explicit BorrowedGenerator(at::Generator g) : mine(std::move(g)), state(cpu.get_state()) { cpu.set_state(mine.get_state()); }
  ~BorrowedGenerator() {
    mine.set_state(cpu.get_state());
    cpu.set_state(state);
  }
};

// ---------------------------------------------------------------- one call
struct Call {
  const OperatorHandle& op;
  const OpInfo& info;
  Stack& stack;
  const size_t num_args, first;
  Twins twins;
  std::vector<Touch> touches;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // the device's, its alias
  std::vector<IValue> originals;
  int device = -1;
  bool has_host_tensor = false, has_host_scalar = false;

  Call(const OperatorHandle& op_, Stack& stack_)
      : op(op_), info(info_of(op_)), stack(stack_), num_args(op_.schema().arguments().size()), first(stack_.size() - num_args), originals(num_args) {}

  [[noreturn]] void mixed(const std::string& other) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", Device(kPretend, (DeviceIndex)device),
                " and ", other, "! (", info.name, ")");
  }
  at::Tensor visit(const at::Tensor& t, bool writes) {
    if (!t.defined()) return t;
    if (t.device().type() != kPretend) {
      if (t.device().is_cpu()) (t.dim() > 0 || writes ? has_host_tensor : has_host_scalar) |= !(t.unsafeGetTensorImpl()->is_wrapped_number());
      return t;
    }
    if (device < 0) device = t.device().index();
    if (device != t.device().index()) mixed(t.device().str());
    auto alias = alias_of(t, twins);
    touches.push_back({t, writes});
    if (writes) written.emplace_back(t, alias);
    return alias;
  }
  void read_arguments() {
    for (size_t i = 0; i < num_args; ++i) {
      IValue& v = stack[first + i];
      const bool writes = info.writes[i];
      if (v.isTensor()) {
        if (writes) originals[i] = v;
        v = visit(v.toTensor(), writes);
      } else if (v.isTensorList()) {
        if (writes) originals[i] = v;
        c10::List<at::Tensor> list;
        for (const auto& t : v.toTensorVector()) list.push_back(visit(t, writes));
        v = list;
      } else if (v.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& t : v.toOptionalTensorVector()) list.push_back(t ? std::optional<at::Tensor>(visit(*t, writes)) : std::nullopt);
        v = list;
      } else if (v.isDevice() && v.toDevice().type() == kPretend) {
        if (device < 0) device = index_or_current(v.toDevice());
        v = Device(DeviceType::CPU);
      } else if (v.isGenerator() && v.toGenerator().device().type() == kPretend) {
        v = inner_generator(v.toGenerator());
      }
    }
    TORCH_CHECK(device >= 0, "pretend: ", info.name, ": no device");
    if (has_host_tensor && !info.takes_host_tensors) mixed("cpu");
    if (has_host_scalar && !info.takes_host_tensors && !info.takes_host_scalars) mixed("cpu");
    if (info.generator >= 0 && stack[first + (size_t)info.generator].isNone()) stack[first + (size_t)info.generator] = inner_generator(default_generator(device));
  }
  // Indices that are masks make the host wait, for their number is a size. (index has asked nonzero before.)
  bool has_mask() const {
    if (!info.takes_host_tensors || info.name == "aten::index" || num_args < 2 || !stack[first + 1].isOptionalTensorList()) return false;
    for (const auto& t : stack[first + 1].toOptionalTensorVector())
      if (t && (t->scalar_type() == kBool || t->scalar_type() == kByte)) return true;
    return false;
  }
  bool makes_host_wait() const {
    if (info.name == "aten::repeat_interleave") return stack[first + num_args - 1].isNone();
    return info.waits || has_mask();
  }
  void redispatch() {
    at::AutoDispatchBelowADInplaceOrView below;
    if (info.substitute) info.substitute(stack, first);
    else op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
  }
  void run() {
    if (info.is_view) return redispatch();
    Entry entry(touches);
    auto& stream = stream_of(device);
    if (makes_host_wait()) {
      count_wait(info.name == "aten::_local_scalar_dense" ? Wait::ITEM : Wait::KERNEL);
      judge(stream, touches, info.name);
      entry.run.unlock();
      wait_uncounted(entry.lock, stream.clock);
      entry.lock.unlock();
      entry.run.lock();
    } else {
      judge(stream, touches, info.name);
      entry.lock.unlock();
    }
    counters.kernels++;
    static const bool counts_names = is_set("PRETEND_COUNT_KERNELS");
    if (counts_names) kernel_counts[info.name]++;
    InKernel inside(device, stream.number);
    std::optional<BorrowedGenerator> borrowed;
    if (info.draws_unnamed) borrowed.emplace(default_generator(device));
    redispatch();
  }
  // An out= or a resize may have given a tensor other memory and another shape.
  void write_back() {
    for (auto& [t, alias] : written) {
      auto* mine = t.storage().unsafeGetStorageImpl();
      auto& twin = alias.storage();
      if (twin.data() != (mine->data_ptr().get() ? body_of(mine->data_ptr().get()) : nullptr) || twin.nbytes() != mine->nbytes()) {
        const size_t n = twin.nbytes();
        auto p = const_cast<Storage&>(twin).set_data_ptr(DataPtr(nullptr, Device(DeviceType::CPU)));
        mine->set_data_ptr_noswap(to_device(std::move(p), device, n));
        mine->set_nbytes(n);
        twins.clear();
      }
      auto* impl = t.unsafeGetTensorImpl();
      if (impl->sizes() != alias.sizes() || impl->strides() != alias.strides()) impl->set_sizes_and_strides(alias.sizes(), alias.strides());
    }
  }
  Twins made;  // the CPU's storage -> the device's
  at::Tensor back(const at::Tensor& t) {
    if (!t.defined() || t.device().type() == kPretend) return t;
    auto* storage = t.storage().unsafeGetStorageImpl();
    for (auto& [mine, twin] : twins)
      if (twin.unsafeGetStorageImpl() == storage) return wrap(t, Storage(intrusive_ptr<StorageImpl>::reclaim_copy(mine)));
    auto it = made.find(storage);
    if (it == made.end()) {
      const size_t n = storage->nbytes();
      auto p = storage->set_data_ptr(DataPtr(nullptr, Device(DeviceType::CPU)));
      it = made.emplace(storage, Storage(Storage::use_byte_size_t(), n, to_device(std::move(p), device, n), &pretend_allocator, true)).first;
    }
    return wrap(t, it->second);
  }
  void return_results() {
    const auto& returns = op.schema().returns();
    const size_t begin = stack.size() - returns.size();
    for (size_t i = 0; i < returns.size(); ++i) {
      IValue& v = stack[begin + i];
      const auto* alias = returns[i].alias_info();
      if (alias && alias->isWrite()) {
        for (size_t j = 0; j < num_args; ++j) {
          const auto* of = op.schema().arguments()[j].alias_info();
          if (of && *of == *alias) v = originals[j];
        }
      } else if (v.isTensor()) {
        v = back(v.toTensor());
      } else if (v.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const auto& t : v.toTensorVector()) list.push_back(back(t));
        v = list;
      }
    }
  }
};
inline void fallback(const OperatorHandle& op, DispatchKeySet, Stack* stack) {
  Call call(op, *stack);
  call.read_arguments();
  call.run();
  call.write_back();
  call.return_results();
}
}  // namespace pretend
