-- Claims a job for a worker. claim.lua claims jobs whose entries were taken before, and read.lua the jobs of new entries.
-- The functions use those of `_lib.lua`.
--
-- Tokens of two models are never mixed in one job. If another model has stored tokens of the job, its entry is left to
-- the workers of that model: it can be taken again after LEFT_MS. With `restart`, a job with stream=false, of which no
-- token was published, begins again with its first token, and other jobs fail.
--
-- Some functions have these arguments:
--   by    the claim: the arguments group, worker, lease_ms, at_risk, model and restarts of claim.lua; `now`, the time of
--         the server in ms; `paused`, whether the queue is paused; `has_leased`, whether this call has just given the
--         entry a lease. Two of its fields count: `n_attempts` the attempts, and `n_bytes` the size of the requests. If
--         the reply to an earlier call was lost, `claimed` maps each entry of that call to the attempt that it has begun,
--         or to 0 if it has begun none
--   last  what the job's hash tells about the last attempt: the fields status, worker, at_risk, started_ms, generated,
--         generated_at_start and move_factor, and `number`, the number of the attempt
--   from  number of the attempt that waits for a slot in another worker, from which the job is taken; '': any

local LEFT_MS = 2000
local MAX_CLAIMED_BYTES = 1048576 -- size of requests from which on a call claims no further job

-- Returns whether the last attempt has this number, was begun for the worker `by`, and waits for its first slot.
local function waits_in_worker(by, last, number)
  return last.status == 'queued' and is_newest_attempt(last.number, last.worker, number, by.worker) and last.at_risk
end

-- Returns whether a job is still as an earlier call left it. The reply to that call was lost. If `known` is above 0, the
-- attempt `known` waits in the worker `by`. If it is 0, no worker has claimed the job.
local function is_unchanged(by, last, known)
  if known == 0 then
    return not last.at_risk
  end
  return waits_in_worker(by, last, known)
end

-- Returns whether a job waits in the attempt `from`, or in the next attempt, which an earlier call has begun for the worker
-- `by`. The reply to that call was lost.
local function can_move(by, last, from)
  return (last.status == 'queued' and last.number == from) or waits_in_worker(by, last, from + 1)
end

-- Returns whether a job has reached a deadline or its timeout. The arguments after `now` are fields of its hash.
local function is_too_late(now, started_ms, queue_deadline_ms, deadline_ms, timeout_ms, slot_ms)
  local deadline = next_deadline_ms('queued', started_ms, queue_deadline_ms, deadline_ms)
  local timeout, slot_time = tonumber(timeout_ms or '0'), tonumber(slot_ms or '0')
  return (deadline and now >= deadline) or (timeout > 0 and slot_time >= timeout)
end

-- Fails a job whose `generated` tokens are from another model. Clients may have read these tokens.
local function fail_other_model(job, events, channel, stream, group, entry, generated)
  local failed = cmsgpack.pack({type = 'failed', code = 'other_model',
    message = 'another model generated the first ' .. generated .. ' tokens, and its workers are gone'})
  terminate(job, events, channel, stream, group, entry, 'failed', failed, {'error', failed})
end

-- Deletes the stored tokens of a job, so that the job begins again with its first token.
local function delete_tokens(job, events)
  allow_writes_when_full(job)
  redis.call('DEL', events)
  redis.call('HSET', job, 'generated', 0)
end

-- Returns how long the job may wait for a slot in the worker `by`, as a multiple of the usual time. The stream of an
-- interrupted job has stopped, so the job waits only a short time. After each move, a job stays longer in its worker, so
-- that it does not move to and fro.
local function next_move_factor(by, last, from)
  if from ~= '' then
    return tonumber(last.move_factor or '1') * (last.worker == by.worker and 1 or 2)
  end
  return last.started_ms and 0.25 or 1
end

-- Begins an attempt of a job, and returns its number.
local function begin_attempt(by, job, last, from)
  allow_writes_when_full(job) -- claimed jobs end, and that frees memory
  local attempt = redis.call('HINCRBY', job, 'attempt', 1) -- an error if another client has written a wrong number
  by.n_attempts = by.n_attempts + 1
  if last.generated_at_start and last.generated ~= last.generated_at_start then
    redis.call('HDEL', job, 'crashes', 'deaths') -- the last attempt stored tokens, so earlier crashes no longer count
  elseif from ~= '' and last.at_risk and last.worker ~= by.worker then
    add_death(job, from, last.worker)
  end
  local move_factor = next_move_factor(by, last, from)
  local fields = {'status', 'queued', 'worker', by.worker, 'lease_ms', by.lease_ms, 'claimed_ms', by.now,
    'generated_at_start', last.generated}
  if last.move_factor or move_factor ~= 1 then
    fields[#fields + 1], fields[#fields + 2] = 'move_factor', move_factor
  end
  if by.model ~= '' and last.generated == '0' then
    fields[#fields + 1], fields[#fields + 2] = 'model', by.model
  end
  if by.at_risk then
    fields[#fields + 1], fields[#fields + 2] = 'at_risk', 1
  elseif last.at_risk then
    redis.call('HDEL', job, 'at_risk')
  end
  redis.call('HSET', job, unpack(fields))
  return attempt
end

-- Deletes the tokens of a job that another model has begun, so that the model of `by` starts it again. If it may not do so,
-- returns the reply to the claim: the job is left to the workers of its model, or it fails, because readers have its tokens.
local function restart_with_other_model(by, job, events, channel, stream, entry, from, generated, request)
  if not by.restarts then
    if from ~= '' then
      return {'stale'}
    end
    renew_lease(stream, by.group, WAITING, entry, LEFT_MS)
    return {'left'}
  end
  if cmsgpack.unpack(request).stream ~= false then
    fail_other_model(job, events, channel, stream, by.group, entry, generated)
    return {'ended'}
  end
  delete_tokens(job, events)
end

-- Claims one job for the worker `by`, and returns the reply that claim.lua describes.
--
-- If the reply to an earlier call was lost, this reply is the same again, unless another worker has taken the job meanwhile.
local function claim_job(by, job, events, stream, entry, channel, from)
  local group, now = by.group, by.now
  local
    status, own_entry, priority, cancel, queue_deadline_ms, deadline_ms, timeout_ms, slot_ms,
    submitted_ms, waits_from_ms, started_ms, attempt, worker, at_risk, generated, generated_at_start,
    move_factor, model, retries_left, token_times, request = unpack(redis.call('HMGET', job,
    'status', 'entry', 'priority', 'cancel', 'queue_deadline_ms', 'deadline_ms', 'timeout_ms', 'slot_ms',
    'submitted_ms', 'waits_from_ms', 'started_ms', 'attempt', 'worker', 'at_risk', 'generated', 'generated_at_start',
    'move_factor', 'model', 'retries_left', 'token_times', 'request'))
  if not status then
    return {'gone'}
  end
  if has_ended(status) or not is_entry_of_job(own_entry, priority, stream, entry) then
    drop_entry(stream, group, entry)
    return {'done'}
  end

  local last = {number = tonumber(attempt), status = status, worker = worker, at_risk = at_risk, started_ms = started_ms,
    generated = generated, generated_at_start = generated_at_start, move_factor = move_factor}
  if from ~= '' and not can_move(by, last, from) then
    return {'stale'}
  end
  local known = by.claimed and by.claimed[entry]
  if known and not is_unchanged(by, last, known) then
    remove_death(job, known, by.worker) -- the worker that has taken the job counted the death of this worker
    return {'stale'}
  end

  if cancel then
    end_without_worker(job, events, channel, stream, group, entry, 'cancelled')
    return {'ended'}
  end
  if is_too_late(now, started_ms, queue_deadline_ms, deadline_ms, timeout_ms, slot_ms) then
    end_without_worker(job, events, channel, stream, group, entry, 'deadline')
    return {'ended'}
  end

  if by.paused and not started_ms then
    if from ~= '' then
      return {'stale'}
    end
    requeue_entry(stream, group, entry)
    return {'paused'}
  end

  if by.model ~= '' and model and model ~= by.model and generated ~= '0' then
    local refusal = restart_with_other_model(by, job, events, channel, stream, entry, from, generated, request)
    if refusal then
      return refusal
    end
    generated, last.generated = '0', '0'
  end

  local waits_from, started = tonumber(waits_from_ms or submitted_ms), tonumber(started_ms or '-1')
  local waited = now - waits_from -- if another client has damaged the time, the error comes before the attempt begins
  local number = (known or 0) > 0 and known or begin_attempt(by, job, last, from)
  if not by.has_leased then
    renew_lease(stream, group, WAITING, entry, by.lease_ms)
  end
  by.n_bytes = by.n_bytes + #(request or '')
  return {
    'run', number, request or '', tonumber(generated), waited,
    started < 0 and -1 or started - waits_from, tonumber(slot_ms or '0'),
    tonumber(deadline_ms or '0') > 0 and deadline_ms - now or -1,
    tonumber(retries_left or '-1'), generated ~= '0' and token_times or '',
  }
end
