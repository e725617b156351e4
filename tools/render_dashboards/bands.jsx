// Grafana's state timeline, drawn after its rules: rows share the height, the first is on top, names take the width they
// need, and the colour of a state is its mapping's.
import { getFieldDisplayName } from '@grafana/data';
import { FIXED_UNIT, UPlotChart, UPlotConfigBuilder, VizLayout, VizLegend } from '@grafana/ui';
import React, { useMemo } from 'react';
import { withMarks } from './annotations.js';

const HORIZONTAL = 0, VERTICAL = 1, FORWARD = 1;

export function Bands({ panel, data, width, height, theme, from, to, marks }) {
  const { perPage, rowHeight } = panel.options;
  if (panel.fieldConfig.defaults.color?.mode === 'thresholds') {
    throw new Error(`${panel.title}: with colours from thresholds Grafana shows no mapping`);
  }
  const shown = perPage ? data.slice(0, perPage) : data;
  const config = useMemo(() => plot(shown, rowHeight, theme, from, to, marks), []);
  return (
    <VizLayout width={width} height={height} legend={legendOf(shown, panel.options.legend)}>
      {(wide, tall) => <UPlotChart config={config} data={[[from * 1000, to * 1000], [null, null]]} width={wide} height={tall} />}
    </VizLayout>
  );
}

// The states that occur, each with its colour.
function legendOf(frames, { showLegend, placement, displayMode, width }) {
  if (!showLegend) return null;
  const states = frames.flatMap(({ fields: [, field] }) => field.values.filter((value) => value !== null).map((value) => field.display(value)));
  const items = [...new Map(states.map(({ text, color }) => [text, { label: text, color, yAxis: 1 }])).values()];
  return (
    <VizLayout.Legend placement={placement} width={width}>
      <VizLegend placement={placement} items={items} displayMode={displayMode} />
    </VizLayout.Legend>
  );
}

function plot(frames, rowHeight, theme, from, to, marks) {
  const builder = new UPlotConfigBuilder('utc');
  const each = rowHeight / frames.length, gap = frames.length > 1 ? (1 - rowHeight) / (frames.length - 1) : 0;
  const top = (row) => row * (each + gap);
  builder.addScale({ scaleKey: 'x', isTime: true, orientation: HORIZONTAL, direction: FORWARD, range: () => [from * 1000, to * 1000] });
  builder.addScale({ scaleKey: FIXED_UNIT, isTime: false, orientation: VERTICAL, direction: FORWARD, range: [0, 1] });
  builder.addAxis({ scaleKey: 'x', isTime: true, placement: 'bottom', timeZone: 'utc', theme, grid: { show: true } });
  builder.addAxis({
    scaleKey: FIXED_UNIT, isTime: false, placement: 'left', theme, grid: { show: false }, ticks: { show: false }, gap: 16,
    splits: () => frames.map((_, row) => 1 - top(row) - each / 2),
    values: () => frames.map((frame) => getFieldDisplayName(frame.fields[1], frame, frames)),
  });
  builder.addSeries({ scaleKey: FIXED_UNIT, theme, lineWidth: 0, pathBuilder: () => null, pointsBuilder: () => false });
  builder.addHook('draw', (u) => {
    const { ctx, bbox } = u;
    ctx.save();
    frames.forEach((frame, row) => {
      const [{ values: times }, field] = frame.fields;
      ctx.globalAlpha = field.config.custom.fillOpacity / 100;
      field.values.forEach((value, place) => {
        if (value === null) return;
        const [begin, end] = [times[place], times[place + 1] ?? to * 1000].map((time) => Math.round(u.valToPos(time, 'x', true)));
        ctx.fillStyle = field.display(value).color;
        ctx.fillRect(begin, bbox.top + Math.round(top(row) * bbox.height), end - begin, Math.round(each * bbox.height));
      });
    });
    ctx.restore();
  });
  withMarks(builder, marks, theme);
  return builder;
}
