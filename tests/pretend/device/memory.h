// Memory of the devices. Each has one memory file, mapped twice: the addresses that tensors show are
// PROT_NONE, so that a host that touches them dies at once; kernels use the second mapping. Blocks are
// best-fit multiples of 512 bytes and belong to the stream that took them, as in torch's allocator for CUDA.
#pragma once
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <sys/mman.h>
#include <unistd.h>
#include <cstring>

#include "clocks.h"

namespace pretend {
// An access by another stream to bytes that were freed before it was surely over: judged when they are used again.
struct Ghost {
  size_t first, end;
  Access access;
};
struct Block {
  int device = 0, home = 0;  // home: the stream that took it
  size_t offset = 0, size = 0, requested = 0;
  Spans spans;
  std::vector<Ghost> ghosts;
  std::set<int> recorded;                    // record_stream
  int flying_reads = 0, flying_writes = 0;   // collectives under way
};
struct Deferred {  // freed, and not yet to be used again
  Block* block;
  std::vector<Access> until;
};
constexpr int kVirgin = -1;  // home of what no stream holds: not reserved
struct FreeRange {
  size_t size;
  int home;
};
struct DeviceMemory {
  char *face = nullptr, *body = nullptr;
  size_t limit = 0;
  std::map<size_t, FreeRange> free_ranges;                        // by offset
  std::map<int, std::set<std::pair<size_t, size_t>>> free_sizes;  // by home: (size, offset)
  std::map<size_t, Block*> used;
  std::vector<Deferred> deferred;
  std::vector<Ghost> ghosts;
  CachingDeviceAllocator::DeviceStats stats;

  void add_free(size_t offset, size_t size, int home) {
    free_ranges[offset] = {size, home};
    free_sizes[home].insert({size, offset});
  }
  void remove_free(std::map<size_t, FreeRange>::iterator it) {
    free_sizes[it->second.home].erase({it->second.size, it->first});
    free_ranges.erase(it);
  }
  void merge_free(size_t offset, size_t size, int home) {
    auto after = free_ranges.lower_bound(offset);
    if (after != free_ranges.end() && after->first == offset + size && after->second.home == home) {
      size += after->second.size;
      remove_free(after++);
    }
    after = free_ranges.lower_bound(offset);
    if (after != free_ranges.begin()) {
      auto before = std::prev(after);
      if (before->first + before->second.size == offset && before->second.home == home) {
        offset = before->first;
        size += before->second.size;
        remove_free(before);
      }
    }
    add_free(offset, size, home);
  }
};
inline std::vector<std::unique_ptr<DeviceMemory>>& memories() {
  static auto* all = new std::vector<std::unique_ptr<DeviceMemory>>(64);
  return *all;
}

inline void use_runtime() {
  TORCH_CHECK(!is_bad_fork, "Cannot re-initialize ", upper_name(), " in forked subprocess. To use ", upper_name(),
              " with multiprocessing, you must use the 'spawn' start method");
  if (is_used) return;
  is_used = true;
  visible();
}
inline bool has_context(int device) { return device >= 0 && device < 64 && memories()[device] && !is_bad_fork; }

// A device's memory; the first use makes its context.
inline DeviceMemory& memory_of(int device) {
  use_runtime();
  TORCH_CHECK(device >= 0 && device < device_count(), "invalid device ordinal ", device, ": there are ", device_count());
  auto& memory = memories()[device];
  if (memory) return *memory;
  auto made = std::make_unique<DeviceMemory>();
  made->limit = (size_t)number_setting("PRETEND_MEMORY", int64_t(1) << 32) / 4096 * 4096;
  int fd = memfd_create("pretend", MFD_CLOEXEC);
  TORCH_CHECK(fd >= 0 && ftruncate(fd, (off_t)made->limit) == 0, "pretend: no memory file");
  made->face = (char*)mmap(nullptr, made->limit, PROT_NONE, MAP_SHARED, fd, 0);
  made->body = (char*)mmap(nullptr, made->limit, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  TORCH_CHECK(made->face != MAP_FAILED && made->body != MAP_FAILED, "pretend: no mapping");
  close(fd);
  made->add_free(0, made->limit, kVirgin);
  memory = std::move(made);
  return *memory;
}

// Inside a kernel: its device and stream. What the CPU's code takes there is the device's memory.
struct KernelPlace {
  int device = -1, stream = -1;
};
inline thread_local KernelPlace kernel_place;
struct InKernel {
  KernelPlace before = kernel_place;
  InKernel(int device, int stream) { kernel_place = {device, stream}; }
  ~InKernel() { kernel_place = before; }
};

// ---------------------------------------------------------------- taking and giving blocks
inline void add_stat(CachingAllocator::StatArray& stat, int64_t by) {
  if (by >= 0) stat[0].increase((size_t)by); else stat[0].decrease((size_t)-by);
}
inline std::string mib(size_t bytes) { return std::to_string(bytes >> 20) + "." + std::to_string((bytes >> 10) % 1024 * 100 / 1024 / 10) + " MiB"; }

inline void reuse(DeviceMemory& memory, Block* block) {
  add_stat(memory.stats.active_bytes, -(int64_t)block->size);
  add_stat(memory.stats.active, -1);
  memory.merge_free(block->offset, block->size, block->home);
  delete block;
}
inline bool is_over(const Deferred& freed) {
  if (freed.block->flying_reads || freed.block->flying_writes) return false;
  // What comes next on these bytes comes on their home stream: it is enough that this one has waited.
  auto& home = streams()[freed.block->home]->clock;
  return std::all_of(freed.until.begin(), freed.until.end(),
                     [&](auto& access) { return is_ordered(home, access) || is_ordered(host_clock, access); });
}
inline void reuse_what_is_over(DeviceMemory& memory, bool all = false) {
  std::vector<Deferred> kept;
  for (auto& freed : memory.deferred) {
    bool flies = freed.block->flying_reads || freed.block->flying_writes;
    if (is_over(freed) || (all && !flies)) reuse(memory, freed.block); else kept.push_back(freed);
  }
  memory.deferred = std::move(kept);
}
// As cudaFree of what is cached; it waits for the device, so no access to it can still be under way.
inline void release_cached(DeviceMemory& memory) {
  std::vector<std::pair<size_t, FreeRange>> cached;
  for (auto& [offset, range] : memory.free_ranges)
    if (range.home != kVirgin) cached.emplace_back(offset, range);
  for (auto& [offset, range] : cached) {
    memory.remove_free(memory.free_ranges.find(offset));
    add_stat(memory.stats.reserved_bytes, -(int64_t)range.size);
    const size_t first = (offset + 4095) / 4096 * 4096, end = (offset + range.size) / 4096 * 4096;
    if (first < end) madvise(memory.body + first, end - first, MADV_REMOVE);  // whole pages: others hold tensors
    memory.merge_free(offset, range.size, kVirgin);
    std::erase_if(memory.ghosts, [&](auto& g) { return g.first < offset + range.size && g.end > offset; });
  }
}
inline std::map<size_t, FreeRange>::iterator best_fit(DeviceMemory& memory, size_t size, int home) {
  for (int whose : {home, kVirgin}) {
    auto& sizes = memory.free_sizes[whose];
    auto it = sizes.lower_bound({size, 0});
    if (it != sizes.end()) return memory.free_ranges.find(it->second);
  }
  return memory.free_ranges.end();
}
[[noreturn]] inline void out_of_memory(DeviceMemory& memory, int device, size_t size) {
  memory.stats.num_ooms++;
  size_t largest = 0, held = (size_t)memory.stats.allocated_bytes[0].current;
  for (auto& [offset, range] : memory.free_ranges) largest = std::max(largest, range.size);
  C10_THROW_ERROR(OutOfMemoryError, upper_name() + " out of memory. Tried to allocate " + mib(size) + ". " + upper_name() + " " +
                  std::to_string(device) + " has a total capacity of " + mib(memory.limit) + " of which " +
                  mib(memory.limit - (size_t)memory.stats.reserved_bytes[0].current) + " is free. Of the allocated memory " + mib(held) +
                  " is allocated by PyTorch; the largest free piece has " + mib(largest) + ".");
}
inline void judge_ghosts(Block* block, const StreamState& s, const std::string& op) {
  auto ghosts = std::move(block->ghosts);
  block->ghosts.clear();
  for (auto& ghost : ghosts)
    if (!is_ordered(s.clock, ghost.access))
      report_race(op + " on " + stream_name(s.number) + " uses memory again that " + stream_name(ghost.access.stream) +
                  " may still use: it was freed with no wait and no record_stream");
}
inline Block* take(int device, size_t requested) {
  Lock lock(accounts());
  auto& memory = memory_of(device);
  const size_t size = std::max<size_t>(512, (requested + 511) / 512 * 512);
  const bool in_kernel = kernel_place.device >= 0;
  auto& stream = in_kernel ? *streams()[kernel_place.stream] : stream_of(device);
  if (!memory.deferred.empty()) reuse_what_is_over(memory);
  auto it = best_fit(memory, size, stream.number);
  if (it == memory.free_ranges.end()) {  // as CUDA's: wait for what streams still hold, then return what is cached
    memory.stats.num_alloc_retries++;
    reuse_what_is_over(memory, true);
    it = best_fit(memory, size, stream.number);
    if (it == memory.free_ranges.end()) {
      release_cached(memory);
      it = best_fit(memory, size, stream.number);
    }
    if (it == memory.free_ranges.end()) out_of_memory(memory, device, size);
  }
  auto [offset, range] = *it;
  memory.remove_free(it);
  if (range.size > size) memory.add_free(offset + size, range.size - size, range.home);
  auto* block = new Block{device, stream.number, offset, size, requested};
  memory.used[offset] = block;
  std::erase_if(memory.ghosts, [](auto& ghost) { return is_ordered(host_clock, ghost.access); });
  for (auto& ghost : memory.ghosts)
    if (ghost.first < offset + size && ghost.end > offset) block->ghosts.push_back(ghost);
  std::erase_if(memory.ghosts, [&](auto& g) { return g.first >= offset && g.end <= offset + size; });
  Span fresh{size, {}, {}};
  if (in_kernel) {
    judge_ghosts(block, stream, "a kernel");
    fresh.wrote = {stream.number, at_stream(stream.clock, stream.number)};
  }
  block->spans.emplace(0, fresh);
  if (range.home == kVirgin) add_stat(memory.stats.reserved_bytes, (int64_t)size);
  add_stat(memory.stats.allocated_bytes, (int64_t)size);
  add_stat(memory.stats.active_bytes, (int64_t)size);
  add_stat(memory.stats.requested_bytes, (int64_t)requested);
  add_stat(memory.stats.allocation, 1);
  add_stat(memory.stats.active, 1);
  if (poisons_memory()) std::memset(memory.body + offset, 0xFF, size);
  return block;
}
inline void give(void* context) {
  if (!context || is_bad_fork) return;
  Lock lock(accounts());
  auto* block = (Block*)context;
  auto& memory = *memories()[block->device];
  memory.used.erase(block->offset);
  add_stat(memory.stats.allocated_bytes, -(int64_t)block->size);
  add_stat(memory.stats.requested_bytes, -(int64_t)block->requested);
  add_stat(memory.stats.allocation, -1);
  // The bytes go back to their home stream. What other streams did to them must be over when they are used again:
  // a recorded stream is waited for, and a group keeps its tensors until it is done; else it is a ghost.
  Deferred freed{block, {}};
  for (int number : block->recorded)
    if (number != block->home) freed.until.push_back({number, at_stream(streams()[number]->clock, number)});
  auto& home = streams()[block->home]->clock;
  for (auto& [first, span] : block->spans) {
    auto judge = [&](const Access& access) {
      if (access.stream == block->home || is_ordered(home, access) || is_ordered(host_clock, access)) return;
      if (block->recorded.count(access.stream)) return;
      if (streams()[access.stream]->is_group) freed.until.push_back(access);
      else memory.ghosts.push_back({block->offset + first, block->offset + span.end, access});
    };
    judge(span.wrote);
    for (auto& read : span.reads) judge(read);
  }
  if (is_over(freed)) reuse(memory, block); else memory.deferred.push_back(std::move(freed));
}

inline Block* find_block(int device, const void* face) {
  if (!has_context(device)) return nullptr;
  auto& memory = *memories()[device];
  auto* p = (const char*)face;
  if (p < memory.face || p >= memory.face + memory.limit) return nullptr;
  const size_t offset = (size_t)(p - memory.face);
  auto it = memory.used.upper_bound(offset);
  if (it == memory.used.begin()) return nullptr;
  --it;
  return it->first + it->second->size > offset ? it->second : nullptr;
}
inline void* body_of(const void* face) {
  for (auto& memory : memories())
    if (memory && (char*)face >= memory->face && (char*)face < memory->face + memory->limit)
      return memory->body + ((char*)face - memory->face);
  return const_cast<void*>(face);
}

// ---------------------------------------------------------------- torch's allocators
struct PretendAllocator final : DeviceAllocator {
  static DataPtr allocate_on(int device, size_t n) {
    const Device where(kPretend, (DeviceIndex)device);
    if (!n) {
      memory_of(device);
      return {nullptr, nullptr, &give, where};
    }
    auto* block = take(device, n);
    return {memories()[device]->face + block->offset, block, &give, where};
  }
  DataPtr allocate(size_t n) override { return allocate_on(current_device, n); }
  DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(body_of(to), body_of(from), n); }
  bool initialized() override { return is_used; }
  void emptyCache(MempoolId_t) override {
    Lock lock(accounts());
    if (is_bad_fork) return;
    for (auto& memory : memories()) {
      if (!memory) continue;
      reuse_what_is_over(*memory);
      release_cached(*memory);
    }
  }
  void recordStream(const DataPtr& p, Stream s) override {
    Lock lock(accounts());
    if (auto* block = find_block(s.device_index(), p.get())) block->recorded.insert(state_of(s).number);
  }
  CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    Lock lock(accounts());
    return memory_of(d).stats;
  }
  static std::array<CachingAllocator::StatArray*, 7> all_stats(CachingDeviceAllocator::DeviceStats& s) {
    return {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.requested_bytes, &s.allocation, &s.active, &s.segment};
  }
  void resetAccumulatedStats(DeviceIndex d) override {
    Lock lock(accounts());
    auto& stats = memory_of(d).stats;
    for (auto* stat : all_stats(stats)) (*stat)[0].reset_accumulated();
    stats.num_ooms = stats.num_alloc_retries = 0;
  }
  void resetPeakStats(DeviceIndex d) override {
    Lock lock(accounts());
    for (auto* stat : all_stats(memory_of(d).stats)) (*stat)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    Lock lock(accounts());
    auto& memory = memory_of(d);
    return {memory.limit - (size_t)memory.stats.reserved_bytes[0].current, memory.limit};
  }
};
inline PretendAllocator pretend_allocator;

// Torch's allocator of the CPU, wrapped: within a kernel, results and workspace are the device's memory.
// Some code takes raw memory, whose address is all that it keeps.
inline Allocator* usual_allocator = nullptr;
inline Block* block_at_body(void* p) {
  Lock lock(accounts());
  for (int d = 0; d < (int)memories().size(); ++d) {
    auto& memory = memories()[d];
    if (memory && (char*)p >= memory->body && (char*)p < memory->body + memory->limit)
      return find_block(d, memory->face + ((char*)p - memory->body));
  }
  return nullptr;
}
inline void give_body(void* p) {
  if (auto* block = block_at_body(p)) give(block);
  else if (usual_allocator->raw_deleter()) usual_allocator->raw_deleter()(p);
}
struct KernelAllocator final : Allocator {
  DataPtr allocate(size_t n) override {
    if (kernel_place.device < 0 || !n) return usual_allocator->allocate(n);
    auto* block = take(kernel_place.device, n);
    void* p = memories()[kernel_place.device]->body + block->offset;
    return {p, p, &give_body, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &give_body; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};

// ---------------------------------------------------------------- pinned memory
struct Pinned {
  size_t size;
  int copies = 0;  // that are still to be made
  bool is_freed = false;
};
inline std::map<char*, Pinned>& pinned_blocks() {
  static auto* all = new std::map<char*, Pinned>();
  return *all;
}
inline std::map<char*, Pinned>::iterator find_pinned(const void* p) {
  auto& all = pinned_blocks();
  auto it = all.upper_bound((char*)p);
  if (it == all.begin()) return all.end();
  --it;
  return (char*)p < it->first + it->second.size && !it->second.is_freed ? it : all.end();
}
inline void free_pinned(std::map<char*, Pinned>::iterator it) {
  char* p = it->first;
  pinned_blocks().erase(it);
  std::free(p);
}
inline void unpin(void* p) {
  Lock lock(accounts());
  auto it = pinned_blocks().find((char*)p);
  if (it == pinned_blocks().end()) return;
  if (it->second.copies) it->second.is_freed = true; else free_pinned(it);
}
struct PinnedAllocator final : at::HostAllocator {
  DataPtr allocate(size_t n) override {
    Lock lock(accounts());
    memory_of(current_device);  // as CUDA's: pinning makes a context
    void* p = nullptr;
    n = std::max<size_t>(n, 1);
    TORCH_CHECK(posix_memalign(&p, 4096, n) == 0, "pretend: no pinned memory");
    pinned_blocks()[(char*)p] = Pinned{n};
    return {p, p, &unpin, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline PinnedAllocator pinned_allocator;
}  // namespace pretend
